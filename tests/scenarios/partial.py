"""`compression=Partial(...)`: nobody waits, nothing is lost, and replicas are equal. Over MPI alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from horovod_oktopk import Dense, OkTopk, OptionError, Partial, PluginError, TransportError
from horovod_oktopk.phases.volume import oktopk_bound
from tests.scenarios.common import (
    assert_conserved,
    assert_equal_everywhere,
    assert_options_must_agree,
    environment,
    everywhere,
    flat,
    gradients,
    is_last,
    k_of,
    needs_ranks,
    raised_everywhere,
    shared_folder,
    take_steps,
    total,
)
from tests.scenarios.driver import Kind, Trainer
from tests.support.schemes import EXACT, SCHEMES

STEPS = 8


def delays(hvd: Any, steps: int) -> Iterator[int]:
    """Yield the steps; before each, this rank sleeps for a while of its own."""
    random = np.random.default_rng((7, hvd.rank()))
    for step in range(steps):
        time.sleep(random.exponential(0.002) + 0.003 * (hvd.rank() == step % hvd.size()))
        yield step


def train(kind: Kind, compression: Any, steps: int = STEPS, **arguments: Any) -> Trainer:
    trainer = kind(compression, op=kind.hvd.Sum, **arguments)
    for step in delays(kind.hvd, steps):
        trainer.step(gradients(step, kind.hvd.rank()))
    return trainer


def check_nothing_is_lost_and_replicas_are_equal(kind: Kind) -> None:
    for policy in ("solo", "majority"):
        for scheme in (Dense(), *EXACT.values(), SCHEMES["SameBlocks"]):
            trainer = train(kind, Partial(scheme, policy=policy))
            trainer.synchronize_replicas()
            assert_conserved(kind.hvd, trainer, total(kind.hvd, *range(STEPS)))
            if isinstance(scheme, Dense):
                assert not trainer.residual().any(), "all that was handed in has been in a round"


def check_elastic_jobs_are_refused(kind: Kind) -> None:
    with environment(HOROVOD_ELASTIC="1"):
        trainer = kind(Partial(OkTopk(density=0.1)))
        for message in raised_everywhere(kind.hvd, PluginError, partial(take_steps, kind.hvd, trainer, 0)):
            assert "cannot be used in an elastic job" in message


def check_replicas_that_have_seen_the_same_rounds_are_equal(kind: Kind) -> None:
    """At every step, not only in the end; with momentum, which makes the order and the number of updates count."""
    hvd, seen = kind.hvd, {}
    trainer = kind(Partial(OkTopk(density=0.2), policy="solo"), momentum=0.9, lr=0.125)
    for step in delays(hvd, 3 * STEPS):
        trainer.step(gradients(step, hvd.rank()))
        seen[trainer.report().step] = flat(trainer.values()).tobytes()
    trainer.synchronize_replicas()
    assert_equal_everywhere(hvd, trainer.values())
    others = everywhere(hvd, seen)
    for step in set.intersection(*map(set, others)):
        assert len({each[step] for each in others}) == 1, f"the replicas differ after round {step}"


def check_a_round_has_one_learning_rate(kind: Kind) -> None:
    """Ranks at different steps of their schedules still apply the same update."""
    hvd = kind.hvd
    trainer = kind(Partial(Dense(), policy="solo"), momentum=0.5)
    for step in delays(hvd, STEPS):
        trainer.set_lr(1.0 / (1 + step) + hvd.rank())
        trainer.step(gradients(step, hvd.rank()))
        assert abs(trainer.lr() - (1.0 / (1 + step) + hvd.rank())) < 1e-6, "a rank's own rate is left to it"
    trainer.synchronize_replicas()
    assert_equal_everywhere(hvd, trainer.values())


def check_ranks_may_take_different_numbers_of_steps(kind: Kind) -> None:
    hvd = kind.hvd
    steps = STEPS + 6 * hvd.rank()
    trainer = train(kind, Partial(OkTopk(density=0.1), policy="majority", max_staleness=4), steps)
    trainer.synchronize_replicas()
    mine = sum(flat(gradients(step, hvd.rank())) for step in range(steps))
    assert_conserved(hvd, trainer, sum(everywhere(hvd, mine)))


def check_evaluation_in_the_middle(kind: Kind) -> None:
    """After `synchronize_replicas` replicas are equal, other collectives can be used, and training goes on."""
    hvd = kind.hvd
    trainer = kind(Partial(OkTopk(density=0.1), policy="solo"), op=hvd.Sum)
    for epoch in range(3):
        for step in delays(hvd, 5):
            trainer.step(gradients(5 * epoch + step, hvd.rank()))
        trainer.synchronize_replicas()
        assert_conserved(hvd, trainer, total(hvd, *range(5 * epoch + 5)))


def check_models_that_are_averaged(kind: Kind) -> None:
    """In the paper a late rank skips to the latest update, and models drift apart until they are averaged."""
    hvd = kind.hvd
    trainer = kind(Partial(Dense(), policy="solo", in_order=False, max_staleness=1000))
    waits = is_last(hvd) and hvd.size() > 1
    take_steps(hvd, trainer, *range(1 if waits else STEPS))
    everywhere(hvd, "all but the last rank have taken their steps")
    trainer.step(gradients(STEPS, hvd.rank()))
    models = everywhere(hvd, flat(trainer.values()))
    assert hvd.size() == 1 or not np.array_equal(models[0], models[-1]), "the last rank has not missed a round"
    trainer.synchronize_replicas()
    assert_equal_everywhere(kind.hvd, trainer.values())
    trainer.step(gradients(0, kind.hvd.rank()))
    trainer.synchronize_replicas()
    assert_equal_everywhere(kind.hvd, trainer.values())


def check_nan_on_one_rank_costs_its_gradient_alone(kind: Kind) -> None:
    hvd = kind.hvd
    for scheme in (Dense(), OkTopk(density=0.2)):
        trainer = kind(Partial(scheme, policy="majority"), op=hvd.Sum)
        for step in delays(hvd, STEPS):
            mine = gradients(step, hvd.rank())
            if step == 4 and is_last(hvd):
                mine["d"][:] = np.nan
            trainer.step(mine)
        trainer.synchronize_replicas()
        trainer.step(gradients(STEPS, hvd.rank()))  # takes along what the skipped round has left
        trainer.synchronize_replicas()
        lost = flat(gradients(4, hvd.size() - 1))
        assert_conserved(hvd, trainer, total(hvd, *range(STEPS + 1)) - lost)


def check_a_density_that_changes(kind: Kind) -> None:
    hvd = kind.hvd
    trainer = kind(Partial(OkTopk(density=0.5), policy="solo"), op=hvd.Sum)
    if kind.name != "keras":  # where there is no reduction before the first step
        trainer.set_density(0.3)
    for step in delays(hvd, STEPS):
        if kind.name != "keras" and step == 1:
            assert trainer.report().k in (k_of(hvd, 0.3), k_of(hvd, 0.1)), "0.1 if the others are far ahead"
        if step == STEPS // 2:
            trainer.set_density(0.1)
        trainer.step(gradients(step, hvd.rank()))
    trainer.synchronize_replicas()
    trainer.step(gradients(STEPS, hvd.rank()))
    assert trainer.report().k == k_of(hvd, 0.1)
    trainer.synchronize_replicas()
    assert_conserved(hvd, trainer, total(hvd, *range(STEPS + 1)))


def check_a_checkpoint_keeps_what_is_pending(kind: Kind) -> None:
    hvd = kind.hvd
    trainer = train(kind, Partial(OkTopk(density=0.05), policy="solo"))
    with shared_folder(hvd) as folder:
        trainer.synchronize_replicas()
        trainer.save(str(folder / "state"))
        resumed = kind(Partial(OkTopk(density=0.05), policy="solo"), op=hvd.Sum)
        resumed.assign(trainer.values())
        resumed.load(str(folder / "state"))
        resumed.step(gradients(STEPS, hvd.rank()))
        resumed.synchronize_replicas()
        assert_conserved(hvd, resumed, total(hvd, *range(STEPS + 1)))


def check_reports_tell_who_came_and_what_was_saved(kind: Kind) -> None:
    hvd = kind.hvd
    trainer = kind(Partial(OkTopk(density=0.1), policy="solo"))
    rounds, saved = 0, []
    for step in range(2 * STEPS):
        time.sleep(0.05 * (step % hvd.size() == hvd.rank()))
        trainer.step(gradients(step, hvd.rank()))
        report = trainer.report()
        assert len(report.active) == len(report.staleness) == (hvd.size() if report.rounds else 0)
        words = report.payload_bytes()[0] / 4
        assert words <= report.rounds * oktopk_bound(report.k, hvd.size())
        rounds += report.rounds
        saved.append(report.seconds_saved)
        assert report.rounds or not saved[-1]
        scalars = report.scalars("p")
        assert (scalars["p/active_ranks"], scalars["p/seconds_saved"]) == (sum(report.active), report.seconds_saved)
    trainer.synchronize_replicas()
    assert rounds >= STEPS
    assert any(saved)  # more, or less, than in synchronous steps; one step alone may take as long, to the nanosecond


def check_an_exception_in_a_step_is_no_ones_but_its_ranks(kind: Kind) -> None:
    hvd, caught = kind.hvd, []
    trainer = kind(Partial(Dense(), policy="solo"), op=hvd.Sum)
    for step in delays(hvd, STEPS):
        try:
            if step == 3 and is_last(hvd):
                raise OSError("a file that cannot be read")
            trainer.step(gradients(step, hvd.rank()))
        except OSError as error:
            caught.append(error)
    trainer.synchronize_replicas()
    assert len(caught) == is_last(hvd)
    assert_conserved(hvd, trainer, total(hvd, *range(STEPS)) - flat(gradients(3, hvd.size() - 1)))


def check_different_options_are_refused(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    scheme = OkTopk(density=0.1)
    assert_options_must_agree(
        kind,
        (Partial(policy="solo"), Partial(policy="majority"), "partial policy: solo", "partial policy: majority"),
        (Partial(Dense()), Partial(scheme), "DenseSum", "OkTopk"),
        (scheme, Partial(scheme), "partial policy: majority"))


def check_a_rank_that_does_not_come(kind: Kind) -> None:
    """Other ranks' rounds wait for it, and then fail on all ranks; there is no hang."""
    hvd = kind.hvd
    needs_ranks(hvd)
    trainer = kind(Partial(Dense(), policy="solo", max_staleness=2, timeout=0.2))
    trainer.step(gradients(0, hvd.rank()))
    everywhere(hvd, "all have taken a step")

    def go_on() -> None:
        if is_last(hvd):
            time.sleep(1.0)
            trainer.synchronize_replicas()
        take_steps(hvd, trainer, *range(20))

    messages = raised_everywhere(hvd, TransportError, go_on)
    assert f"ranks [{hvd.size() - 1}] have not come for 2 rounds, and then for 0.2 s" in messages[0]


def check_a_wrong_inner_scheme_is_refused(kind: Kind) -> None:
    trainer = kind(Partial(Dense()))
    assert "has no density" in raised_everywhere(kind.hvd, OptionError, lambda: trainer.set_density(0.5))[0]


def check_steps_of_two_optimizers_in_turns_are_refused(kind: Kind) -> None:
    trainers = [kind(Partial(Dense(), policy="solo")) for _ in range(2)]
    for trainer in trainers:
        take_steps(kind.hvd, trainer, 0)
    for message in raised_everywhere(kind.hvd, PluginError, partial(take_steps, kind.hvd, trainers[0], 1)):
        assert "train them one after the other" in message
    for trainer in trainers:
        trainer.synchronize_replicas()
