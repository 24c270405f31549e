"""`compression=StepAhead(...)`: local steps, what they did is reduced, and nothing is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from horovod_oktopk import AgreementError, Dense, NonFiniteError, OkTopk, SameBlocks, StepAhead, TopkA
from tests.scenarios.common import (
    SHAPES,
    N,
    assert_equal_everywhere,
    assert_options_must_agree,
    everywhere,
    flat,
    gradients,
    host_sizes,
    is_last,
    k_of,
    logged,
    needs,
    needs_ranks,
    raised_everywhere,
    shared_folder,
    take_steps,
    total,
)
from tests.scenarios.driver import Kind
from tests.scenarios.features import assert_like_stock, assert_passes_like_stock
from tests.support.oracle import oracle_step
from tests.support.schemes import SCHEMES

OPTIONS = StepAhead(OkTopk(density=0.1))
ALONE = StepAhead(Dense(), ahead=1, overlap=False)
"""Nothing but the optimizer's own steps."""
K = 7


class Oracle:
    """All workers' parameters p and the shared ones w, in dense NumPy."""

    def __init__(self, size: int, ahead: float | None, local_steps: int, overlap: bool, global_density: Any) -> None:
        self.w, self.p, self.steps = np.zeros(N), np.zeros((size, N)), 0
        self.size, self.local_steps, self.overlap = size, local_steps, overlap
        self.coefficient = size**-0.25 if ahead is None else ahead
        self.global_k = K if global_density is None else K * size
        self.under_way: Any = None

    def step(self, moves: np.ndarray) -> None:
        self.steps += 1
        is_due = self.steps % self.local_steps == 0
        if is_due:
            self.catch_up()
        self.p = self.p - self.coefficient * moves
        if is_due:
            residuals = self.w - self.p
            update, kept, selected = oracle_step(residuals, K, self.global_k)
            sent = np.where(selected, residuals, 0)
            anticipated = (1 / self.coefficient - 1) * sent
            self.p = self.p - anticipated
            self.under_way = update / (self.coefficient * self.size), anticipated + np.where(kept, sent, 0)
            if not self.overlap:
                self.catch_up()

    def catch_up(self) -> None:
        if self.under_way is not None:
            update, returned = self.under_way
            self.w, self.p, self.under_way = self.w - update, self.p + returned - update, None


def on_hosts(length: int, options: StepAhead = OPTIONS, **others: Any) -> StepAhead:
    """Return options with hosts. length: ranks that are one worker."""
    inner = replace(options.scheme, hierarchical=length) if length > 1 else options.scheme
    return replace(options, inner=inner, **others)


def lengths(kind: Kind) -> list[int]:
    return [1, *host_sizes(kind.hvd.size())]


def train(kind: Kind, trainer: Any, steps: range) -> np.ndarray:
    """Return what ranks share in the end."""
    take_steps(kind.hvd, trainer, *steps)
    values = trainer.values()
    assert_equal_everywhere(kind.hvd, values)
    assert np.isfinite(flat(values)).all()
    return flat(values)


def random_gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    """Return gradients without ties, which other roundings would break in another way."""
    random = np.random.default_rng((step, rank))
    return {name: random.standard_normal(shape) for name, shape in SHAPES.items()}


def check_every_step_is_the_oracles(kind: Kind) -> None:
    """Frameworks and many ranks need more time, and have a part of the options. Who looks at w applies what is under
    way, so one run looks after every step, and another at the end alone. Where a host is one worker, Horovod averages
    gradients over its ranks."""
    needs_ranks(kind.hvd)
    rank, size = kind.hvd.rank(), kind.hvd.size()
    atol = 1e-6 if kind.name == "keras" else 1e-12  # a learning rate of Keras is float32
    options = list(itertools.product((None, 0.5, 1), (1, 3), (True, False), (None, "auto")))
    every = 11 if size > 5 else 5 if kind.name != "core" or size > 2 else 1
    chosen = [(1, *each) for each in options[::every]]
    # On hosts as many sums are kept of each slice as were selected there: the oracle's, if these are all.
    chosen += [(length, *each) for length in host_sizes(size) for each in options[1::4 if every == 1 else 2 * every]
               if each[-1] == "auto"]
    for (length, ahead, local_steps, overlap, kept), looks in itertools.product(chosen, (False, True)):
        oracle = Oracle(size // length, ahead, local_steps, overlap, kept)
        scheme = OkTopk(density=K / N, value_dtype=None, global_density=kept)
        trainer = kind(on_hosts(length, StepAhead(scheme, ahead, overlap, local_steps)), dtype="float64")
        for step in range(8):
            everyone = [random_gradients(step, each) for each in range(size)]
            trainer.step(everyone[rank])
            oracle.step(np.array([flat(each) for each in everyone]).reshape(-1, length, N).mean(axis=1))
            own = oracle.p[rank // length]
            np.testing.assert_allclose(flat(trainer.own_values()), own, rtol=0, atol=atol)
            if looks or step == 7:
                oracle.catch_up()
                np.testing.assert_allclose(flat(trainer.values()), oracle.w, rtol=0, atol=atol)
                np.testing.assert_allclose(flat(trainer.own_values()), oracle.p[rank // length], rtol=0, atol=atol)


def check_an_exchange_is_applied_between_the_passes_of_a_step(kind: Kind) -> None:
    """And not twice; the step that follows is the one that it would have been."""
    needs_ranks(kind.hvd)
    rank, size = kind.hvd.rank(), kind.hvd.size()
    oracle = Oracle(size, None, 1, True, None)
    trainer = kind(StepAhead(OkTopk(density=K / N, value_dtype=None, global_density=None)), dtype="float64")
    trainer.catch_up()  # before the first step there is nothing
    for step in range(4):
        trainer.step(random_gradients(step, rank))
        oracle.step(np.array([flat(random_gradients(step, each)) for each in range(size)]))
        before = flat(trainer.own_values())
        oracle.catch_up()
        for _ in range(2):
            trainer.catch_up()
            own = flat(trainer.own_values())
            np.testing.assert_allclose(own, oracle.p[rank], rtol=0, atol=1e-6 if kind.name == "keras" else 1e-12)
            assert not np.array_equal(own, before)
    assert_equal_everywhere(kind.hvd, trainer.values())


def check_dense_is_like_stock(kind: Kind) -> None:
    """Dense sends all at every step, and nothing is ahead; with the ranks' own momentum, too."""
    everything = OkTopk(density=1.0, value_dtype=None)
    hosts = [replace(everything, hierarchical=length) for length in (*host_sizes(kind.hvd.size()), True)]
    for scheme in (Dense(), everything, *hosts):
        for op in (kind.hvd.Average, kind.hvd.Sum)[:1 if scheme in hosts else 2]:
            assert_like_stock(kind, StepAhead(scheme, ahead=1, overlap=False), op=op, momentum=0.5)


def check_several_backward_passes_add_up(kind: Kind) -> None:
    assert_passes_like_stock(kind, ALONE)


def check_every_scheme_shares_or_holds_what_was_moved(kind: Kind) -> None:
    schemes = [Dense(), *SCHEMES.values(),
               *(OkTopk(density=0.1, hierarchical=length) for length in host_sizes(kind.hvd.size()))]
    for number, scheme in enumerate(schemes):
        options = StepAhead(scheme, overlap=number % 2 == 0, local_steps=3 if number % 4 == 3 else 1)
        length = int(getattr(scheme, "hierarchical", False) or 1)
        trainer = kind(options, op=kind.hvd.Sum)
        for step in range(9):
            trainer.step(gradients(step, kind.hvd.rank()))
            assert_equal_everywhere(kind.hvd, trainer.values())
        assert trainer.report().step == 9 // (options.local_steps if kind.hvd.size() > 1 else 1)
        values, residuals = flat(trainer.values()), np.array(everywhere(kind.hvd, trainer.residual()))
        assert np.abs(values).max() > 0
        by_host = residuals.reshape(-1, length, N)
        assert (by_host == by_host[:, :1]).all(), "the ranks of a host are alike"
        ratio = options.coefficient(kind.hvd.size() // length, False)
        moved = ratio * total(kind.hvd, *range(9))
        np.testing.assert_allclose(by_host[:, 0].sum(axis=0) - ratio * values, moved, rtol=1e-4, atol=1e-2)


def check_a_resumed_run_gives_the_same_bits(kind: Kind) -> None:
    """And the same gain."""
    compressions = [on_hosts(length, overlap=overlap)
                    for length, overlap in itertools.product((1, kind.hvd.size()), (True, False))]
    for options in (*compressions, StepAhead(SameBlocks(density=0.5))):
        trainer, resumed = (kind(options, normalizes=True) for _ in range(2))
        train(kind, trainer, range(5))
        with shared_folder(kind.hvd) as folder:
            trainer.save(f"{folder}/state")
            resumed.assign(trainer.values())
            resumed.load(f"{folder}/state")
            shared = [train(kind, each, range(5, 10)).tobytes() for each in (trainer, resumed)]
        assert shared[0] == shared[1]
        assert flat(trainer.own_values()).tobytes() == flat(resumed.own_values()).tobytes()
        assert trainer.residual().tobytes() == resumed.residual().tobytes()
        assert trainer.report().gain == resumed.report().gain


def check_different_options_are_refused(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    assert_options_must_agree(
        kind, (StepAhead(OkTopk(density=0.2)), OPTIONS, "density: 0.1", "density: 0.2"),
        (StepAhead(TopkA(density=0.1)), OPTIONS, "OkTopk", "TopkA"),
        (replace(OPTIONS, ahead=0.6), replace(OPTIONS, ahead=0.5), "ahead: 0.5", "ahead: 0.6"),
        (replace(OPTIONS, local_steps=2), OPTIONS, "local_steps: 1", "local_steps: 2"))
    trainer = kind(on_hosts(kind.hvd.size() if is_last(kind.hvd) else 1))
    for message in raised_everywhere(kind.hvd, AgreementError, partial(take_steps, kind.hvd, trainer, 0)):
        assert "different options hierarchical" in message, message


def check_what_differs_at_the_beginning_is_told_everywhere(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    trainer = kind(OPTIONS)
    trainer.assign({name: np.full(shape, kind.hvd.rank(), np.float32) for name, shape in SHAPES.items()})
    advice = "BroadcastGlobalVariablesCallback" if kind.name == "keras" else "broadcast_parameters"
    for message in raised_everywhere(kind.hvd, AgreementError, lambda: train(kind, trainer, range(1))):
        assert "must be the same everywhere" in message, message
        assert advice in message, message


def check_one_rank_alone_looks_and_nothing_changes(kind: Kind) -> None:
    """Other ranks need not hear of it, not even if it saves; its parameters may then be rounded in another way."""
    def trained(options: StepAhead, looks: bool = False, saves: bool = False) -> bytes:
        trainer = kind(options)
        for step in range(12 if kind.hvd.size() < 4 else 6):
            trainer.step(gradients(step, kind.hvd.rank()))
            if looks and (kind.hvd.rank() + step) % 3 == 0:
                assert np.isfinite(flat(trainer.values())).all()
                assert not saves or np.isfinite(trainer.residual()).all()
        assert_equal_everywhere(kind.hvd, trainer.values())
        if options.scheme.hierarchical == kind.hvd.size():
            assert trainer.report().payload_bytes()[0] == 0, "nothing leaves the host"
        return flat(trainer.values()).tobytes()

    for length in lengths(kind):
        options = on_hosts(length, overlap=False)
        assert trained(options, looks=True) == trained(options)
        trained(options, looks=True, saves=True)


def check_what_all_ranks_change_alike_is_what_they_share(kind: Kind) -> None:
    """And it stays so: the ranks' own parameters move along, and what they have not sent stays."""
    trainer = kind(OPTIONS)
    shared = train(kind, trainer, range(4))
    own, clipped = flat(trainer.own_values()), np.clip(shared, -0.1, 0.1)
    trainer.assign({name: np.clip(values, -0.1, 0.1) for name, values in trainer.values().items()})
    assert np.array_equal(flat(trainer.values()), clipped)
    np.testing.assert_allclose(flat(trainer.own_values()), clipped + own - shared, atol=1e-4)
    train(kind, trainer, range(4, 8))


def check_what_ranks_change_differently_is_told_everywhere(kind: Kind) -> None:
    """On all ranks, and on one alone."""
    needs_ranks(kind.hvd)
    for changes in (True, is_last(kind.hvd)):
        trainer = kind(OPTIONS)
        train(kind, trainer, range(4))
        if changes:
            trainer.assign({name: each + 0.01 * (1 + kind.hvd.rank()) for name, each in trainer.values().items()})
        for message in raised_everywhere(kind.hvd, AgreementError, partial(train, kind, trainer, range(4, 7))):
            assert "shared_parameters" in message, message


def check_a_worker_whose_gradient_is_not_finite_skips_its_own_step_alone(kind: Kind) -> None:
    """With all ranks of its host, as these have one gradient; and its momentum stays finite."""
    hvd = kind.hvd
    needs_ranks(hvd)
    for length in lengths(kind):
        trainer = kind(on_hosts(length, StepAhead(OkTopk(density=1.0, value_dtype=None), ahead=1, overlap=False)),
                       momentum=0.5)
        before, grads = train(kind, trainer, range(2)), gradients(2, hvd.rank())
        if is_last(hvd):
            grads["d"][0] = np.inf
        with logged() as messages:
            trainer.step(grads)
            after = flat(trainer.values())
        assert np.array_equal(before, after) == (hvd.size() == length), "the others went on"
        said = sorted(each for several in everywhere(hvd, messages) for each in several if "not finite" in each)
        assert [each.partition(",")[0] for each in said] == [
            f"the gradients of rank {rank} are not finite" for rank in range(hvd.size() - length, hvd.size())]
        train(kind, trainer, range(3, 6))
        assert trainer.report().step == 6, "it took part in every exchange"


def check_parameters_that_are_not_finite_are_told_everywhere(kind: Kind) -> None:
    """And what ranks share stays. A finite gradient overflows."""
    hvd = kind.hvd
    needs_ranks(hvd)
    for length, overlap in itertools.product(lengths(kind), (True, False)):
        trainer = kind(on_hosts(length, overlap=overlap), lr=1e6)
        before = train(kind, trainer, range(2))

        def overflow(trainer: Any = trainer) -> None:
            worst = {name: np.full(shape, 1e37, np.float32) for name, shape in SHAPES.items()}
            trainer.step(worst if is_last(hvd) else gradients(2, hvd.rank()))
            trainer.step(gradients(3, hvd.rank()))

        for message in raised_everywhere(hvd, NonFiniteError, overflow):
            assert "are not finite" in message, message
            assert length > 1 or f"ranks [{hvd.size() - 1}]" in message, message
        after = flat(trainer.values())
        assert np.array_equal(after, before), "the shared ones are as before"


def check_the_density_is_set(kind: Kind) -> None:
    trainer = kind(replace(OPTIONS, overlap=False))
    seen = []
    for step, density in enumerate((None, 0.5, 0.2, None)):
        trainer.set_density(density)
        train(kind, trainer, range(step, step + 1))
        seen.append(trainer.report().k)
    assert seen == [k_of(kind.hvd, each) for each in (0.1, 0.5, 0.2, 0.1)]


def check_a_rank_outside_the_process_set_trains_alone(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    needs(kind.supports("process_set"), "process_set")
    trainer = kind(OPTIONS, op=hvd.Sum, process_set=kind.sets[0])
    take_steps(hvd, trainer, *range(3))
    shared = everywhere(hvd, flat(trainer.values()))
    assert all(np.array_equal(each, shared[0]) for each in shared[:-1])
    if is_last(hvd):
        alone = -sum(flat(gradients(step, hvd.rank())) for step in range(3))
        assert np.array_equal(flat(trainer.own_values()), shared[-1])
        assert np.array_equal(shared[-1], alone)


def check_an_optimizer_that_normalizes_takes_longer_steps_on_all_ranks_alike(kind: Kind) -> None:
    """Adam says so by itself. If steps grow with the gradient, or if it is not wanted, there is no gain."""
    for options, normalizes in ((OPTIONS, True), (OPTIONS, False), (replace(OPTIONS, gain=None), True)):
        trainer = kind(options, normalizes=normalizes)
        train(kind, trainer, range(6))
        report, size = trainer.report(), kind.hvd.size()
        assert 1 <= report.noise_ratio <= size
        assert (report.noise_ratio > 1) == (size > 1), "the ranks' data differ: it is measured all the same"
        assert report.gain == (np.sqrt(report.noise_ratio) if normalizes and options.gain else 1)
        assert_equal_everywhere(kind.hvd, {"gain": np.array([report.gain])})


def check_a_gain_is_a_factor_of_the_learning_rate(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    found = []
    for gain, rate in ((2.0, 0.25), (None, 0.5)):
        trainer = kind(replace(ALONE, gain=gain), lr=rate)
        found.append(train(kind, trainer, range(3)))
        assert trainer.lr() == rate, "it is the user's again"
    assert np.array_equal(*found)
