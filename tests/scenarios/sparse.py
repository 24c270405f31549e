"""Sparse steps: against the dense oracle and the core alone, with residuals, NaN, and the report."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np

from horovod_oktopk import Dense, OkTopk
from tests.scenarios.common import (
    N,
    assert_conserved,
    assert_disagreement,
    assert_equal_everywhere,
    computed_once,
    everywhere,
    flat,
    gradients,
    host_sizes,
    is_last,
    needs_ranks,
    take_steps,
    total,
)
from tests.scenarios.driver import Kind, Trainer
from tests.support.oracle import oracle_step
from tests.support.schemes import SCHEMES
from tests.support.slices import by_host, on_slices


def assert_equals_the_oracle(kind: Kind, options: OkTopk, steps: list[tuple[float | None, int, int]],
                             dtype: str = "float32") -> Trainer:
    """Compare with the oracle. steps: density set before the step, elements selected, and kept of the sum.

    On one rank all are selected and kept.
    """
    rank, size = kind.hvd.rank(), kind.hvd.size()
    trainer = kind(options, dtype=dtype, op=kind.hvd.Sum)
    residuals, expected = np.zeros((size, N)), np.zeros(N)
    for step, (density, k, global_k) in enumerate(steps):
        if density is not None:
            trainer.set_density(density)
        trainer.step(gradients(step, rank, dtype))
        k, kept = (k, min(global_k, size * k)) if size > 1 else (N, N)
        residuals += [flat(gradients(step, each)) for each in range(size)]
        update, applied, sent = oracle_step(residuals, k, kept)
        residuals[np.array(sent) & applied] = 0
        expected -= update
        assert (trainer.report().k, trainer.report().global_k) == (k, kept)
        assert np.array_equal(flat(trainer.values()), expected), f"step {step}, {options}"
        assert np.array_equal(trainer.residual(), residuals[rank]), f"step {step}, {options}"
    return trainer


def check_equals_the_oracle_with_residuals(kind: Kind) -> None:
    assert_equals_the_oracle(kind, OkTopk(density=0.1, threshold_interval=1), [(None, 7, 7)] * 5)
    assert_equals_the_oracle(kind, OkTopk(density=9 / N, threshold_interval=1, region_interval=2),
                             [(None, 9, 9)] * 5, dtype="float64")
    assert_equals_the_oracle(kind, OkTopk(density=0.1, threshold_interval=1, transport="horovod"), [(None, 7, 7)] * 5)


def check_dense_is_horovods_own_allreduce(kind: Kind) -> None:
    trainers = [kind(compression, op=kind.hvd.Sum) for compression in (Dense, Dense(), kind.hvd.Compression.none)]
    for step in range(2):
        for trainer in trainers:
            take_steps(kind.hvd, trainer, step)
    for trainer in trainers:
        assert np.array_equal(flat(trainer.values()), -total(kind.hvd, 0, 1))


BITS = SCHEMES | {"OkTopk, over Horovod": replace(SCHEMES["OkTopk"], transport="horovod")}
ON_HOSTS = ("OkTopk", "OkTopk, log4", "OkTopk, over Horovod", "TopkA", "GTopk")


@computed_once
def core_alone(scheme: str, hosts: int, ranks_per_host: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of updates and the hosts' residuals that the core alone makes of the hosts' sums, on threads."""
    sums = np.array([[functools.reduce(np.add, [noise(step, host * ranks_per_host + rank)
                                                for rank in range(ranks_per_host)])
                      for host in range(hosts)] for step in range(steps)])
    runs = on_slices(sums, round(0.1 * N), ranks_per_host, BITS[scheme].algorithm)
    updates = np.zeros(N, np.float32)
    for (update, *_), *_ in runs:
        updates[update.indices] -= update.values
    return updates, by_host([residual for _, _, residual, *_ in runs[-1]], ranks_per_host)


def noise(step: int, rank: int) -> np.ndarray:
    return flat(gradients(step, rank)) + np.random.default_rng((7, step, rank)).standard_normal(N, np.float32)


def step_with(trainer: Trainer, vector: np.ndarray) -> None:
    """Take a step with this flat gradient."""
    grads = {}
    for parameter, value in sorted(trainer.values().items()):
        grads[parameter], vector = vector[:value.size].reshape(value.shape), vector[value.size:]
    trainer.step(grads)


def check_gives_the_same_bits_as_the_core_alone(kind: Kind) -> None:
    """From the same gradients all give the same bits, with every scheme, also where a host is one worker."""
    needs_ranks(kind.hvd)
    size = kind.hvd.size()
    for name, length in [*((name, 1) for name in BITS), *itertools.product(ON_HOSTS, host_sizes(size))]:
        steps = 8  # so many that regions and thresholds are worked out anew
        trainer = kind(replace(BITS[name], hierarchical=length) if length > 1 else BITS[name], op=kind.hvd.Sum)
        for step in range(steps):
            step_with(trainer, noise(step, kind.hvd.rank()))
        updates, residuals = core_alone(name, size // length, length, steps)
        assert flat(trainer.values()).tobytes() == updates.tobytes(), (name, length)
        held = np.array(everywhere(kind.hvd, trainer.residual())).reshape(-1, length, N).sum(axis=1)
        assert held.tobytes() == residuals.tobytes(), (name, length)
        assert_equal_everywhere(kind.hvd, trainer.values())


def check_every_scheme_undoes_nan_and_conserves(kind: Kind) -> None:
    """Also where a host is one worker. On one rank alone the plain optimizer gets the gradient as it is."""
    size = kind.hvd.size()
    on_hosts = {f"{name}, {length} ranks a host": replace(options, hierarchical=length)
                for length in host_sizes(size) for name, options in list(SCHEMES.items())[::2]}
    for name, options in (SCHEMES | on_hosts).items():
        trainer = kind(options, op=kind.hvd.Sum)
        for step in range(4):
            take_steps(kind.hvd, trainer, step)
            assert trainer.report().finite, name
            if step in (1, 2):
                values, before, grads = trainer.values(), trainer.residual(), gradients(9, kind.hvd.rank())
                if is_last(kind.hvd):
                    grads["c.scale"][1, 1, 1] = np.nan if step == 1 else np.inf
                trainer.step(grads)
                assert np.isfinite(flat(trainer.values())).sum() == (0 if size > 1 else N - 1), name
                assert not trainer.report().finite, name
                assert trainer.residual().tobytes() == before.tobytes(), name
                trainer.assign(values)
        assert_conserved(kind.hvd, trainer, total(kind.hvd, *range(4)))


def check_plain_class_takes_the_defaults(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    trainer = kind(OkTopk)
    trainer.step(gradients(0, kind.hvd.rank()))
    report = trainer.report()
    assert report is not None
    assert report.k == max(1, round(0.01 * N))
    assert np.count_nonzero(flat(trainer.values())) == report.global_selected == 1


def check_conservation_and_bounded_volume_over_a_run(kind: Kind) -> None:
    trainer = kind(OkTopk(density=0.05, threshold_interval=3), op=kind.hvd.Sum)
    for step in range(12):
        trainer.step(gradients(step, kind.hvd.rank()))
        report = trainer.report()
        assert 0 < report.local_selected <= report.k
        sent, _ = report.payload_bytes()
        assert sent <= 4 * 6 * report.k * (kind.hvd.size() - 1) / kind.hvd.size()
    assert any(everywhere(kind.hvd, trainer.residual().any())) == (kind.hvd.size() > 1)
    assert_conserved(kind.hvd, trainer, total(kind.hvd, *range(12)))


def check_half_precision_overflow_of_the_sum_is_undone(kind: Kind) -> None:
    trainer = kind(OkTopk(density=0.25), dtype="float16", shapes={"w": (8,)}, op=kind.hvd.Sum)
    trainer.step({"w": np.full(8, 60000.0, np.float16)})
    overflows = kind.hvd.size() > 1
    assert bool(np.isfinite(trainer.values()["w"]).all()) != overflows
    assert trainer.report().finite != overflows
    assert not trainer.residual().any(), "before the step there was none; one rank alone sends all"


def check_report(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    trainer = kind(OkTopk(density=0.1))
    assert trainer.report() is None
    trainer.step(gradients(0, kind.hvd.rank()))
    report = trainer.report()
    figures = report.scalars()
    assert (report.step, figures["oktopk/k"]) == (1, round(0.1 * N))
    assert figures["oktopk/local_selected"] == report.local_selected > 0
    assert {"accumulate", "select", "agree", "write_back"} <= set(report.phases)
    assert report.bytes_sent == sum(traffic.bytes_sent for traffic in report.phases.values())
    assert report.bytes_sent > 0
    totals = everywhere(kind.hvd, (report.bytes_sent, report.bytes_received))
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals)


def check_density_changes_from_step_to_step(kind: Kind) -> None:
    densities = (None, 0.5, 0.25, 0.1, 0.1, 0.3)
    trainer = assert_equals_the_oracle(kind, OkTopk(density=0.5, threshold_interval=1),
                                       [(each, k := round((each or 0.5) * N), k) for each in densities])
    if is_last(kind.hvd):
        trainer.set_density(0.2)
    assert_disagreement(kind.hvd, lambda: trainer.step(gradients(9, 0)), "density: 0.3", "density: 0.2")


def check_what_is_kept_of_the_sum_keeps_its_ratio_to_the_density(kind: Kind) -> None:
    assert_equals_the_oracle(kind, OkTopk(density=0.1, global_density=0.15),
                             [(None, 7, 11), (0.1, 7, 11), (0.2, 14, 21)])


def check_a_density_that_is_measured_is_the_same_on_all_ranks_and_loses_nothing(kind: Kind) -> None:
    """By the real clock, so that the densities differ from one run to the next."""
    needs_ranks(kind.hvd)
    steps = range(65)  # two densities that are tried, and the beginning of a third
    trainer, found = kind(OkTopk(density="auto"), op=kind.hvd.Sum), []
    for step in steps:
        take_steps(kind.hvd, trainer, step)
        found.append(trainer.report().k)
    assert everywhere(kind.hvd, found) == [found] * kind.hvd.size()
    assert_conserved(kind.hvd, trainer, total(kind.hvd, *steps))
    trainer.set_density(0.5)
    take_steps(kind.hvd, trainer, 65)
    assert trainer.report().k == round(0.5 * N)
