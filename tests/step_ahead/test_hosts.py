"""Step-ahead error feedback where each host is one worker, whose ranks take the same steps."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from horovod_oktopk import AgreementError, NonFiniteError, OkTopk, StepAhead
from horovod_oktopk.reducer import checkpoint
from horovod_oktopk.transport.local import run_ranks

from ..support.simulation import same_bits
from .test_reducer import Worker, moves

EXACT = OkTopk(density=0.05, region_interval=5, value_dtype=None)
SCHEMES = [EXACT, OkTopk(density=0.05, value_dtype=None, global_density=None)]
SHAPES = [(1, 3), (2, 2), (3, 2), (2, 3)]


def run(hosts: int, ranks_per_host: int, scheme: Any, steps: int = 12, **options: Any) -> list[list[Any]]:
    """By rank: w, p and the report of each step; each rank moves as its host does."""
    if ranks_per_host > 1:
        scheme = replace(scheme, hierarchical=ranks_per_host)

    def program(transport: Any) -> list[Any]:
        worker, found = Worker(transport, StepAhead(scheme, **options)), []
        for move in moves(transport.rank // ranks_per_host, steps):
            worker.step(move)
            found.append((worker.w.copy(), worker.p, worker.reducer.report))
        worker.reducer.catch_up()
        return [*found, (worker.w, worker.p, worker.reducer.report), worker.moved, worker.reducer.coefficient]

    return run_ranks(hosts * ranks_per_host, program)


@pytest.mark.parametrize(("hosts", "ranks_per_host"), SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=["all sums", "k sums"])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"local_steps": 3, "ahead": 0.7}], ids=str)
def test_the_bits_are_those_of_one_rank_a_host(hosts, ranks_per_host, scheme, options):
    flat = run(hosts, 1, scheme, **options)
    for rank, found in enumerate(run(hosts, ranks_per_host, scheme, **options)):
        for (w, p, _), (expected_w, expected_p, _) in zip(found[:-2], flat[rank // ranks_per_host][:-2], strict=True):
            assert same_bits(w, expected_w)
            assert same_bits(p, expected_p)


@pytest.mark.parametrize(("hosts", "ranks_per_host"), SHAPES)
def test_the_shared_parameters_have_the_same_bits_and_nothing_is_lost(hosts, ranks_per_host):
    """Rounded to 4 bits too."""
    found = run(hosts, ranks_per_host, OkTopk(density=0.05))
    by_host = found[::ranks_per_host]
    for rank, each in enumerate(found):
        assert same_bits(each[-3][0], found[0][-3][0])
        assert same_bits(each[-3][1], by_host[rank // ranks_per_host][-3][1]), "the ranks of a host are alike"
    start = Worker(None).p.astype(np.float64)
    weight = hosts * found[0][-1]
    w = found[0][-3][0]
    applied = weight * (w - start) + sum(each[-3][1].astype(np.float64) - w for each in by_host)
    moved = sum(each[-2] for each in by_host)
    assert np.abs(moved).max() > 0.1
    assert np.allclose(applied, moved, atol=1e-5 * weight)


def test_nothing_but_agreement_leaves_the_host():
    """What stays on it is counted apart."""
    for each in run(1, 3, EXACT):
        report = each[-3][2]
        assert report.payload_bytes()[0] == 0
        assert report.bytes_sent <= 128
        assert report.phases["host_gather"].bytes_sent > 0


def step_and_catch_up(worker: Worker, move: np.ndarray) -> None:
    worker.step(move)
    worker.reducer.catch_up()


@pytest.mark.parametrize("late", [0, 1, 3])
def test_ranks_of_a_host_that_drift_apart_are_told(late):
    def program(transport: Any) -> str:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=2)))
        for move in moves(transport.rank // 2, 3):
            worker.step(move)
        move = moves(7 if transport.rank == late else transport.rank // 2, 1, scale=3.0)[0]
        with pytest.raises(AgreementError, match="which all ranks of a host must change alike") as raised:
            step_and_catch_up(worker, move)
        return str(raised.value)

    assert len(set(run_ranks(4, program))) == 1


def test_parameters_that_are_not_finite_are_an_error_on_all_ranks():
    def program(transport: Any) -> tuple[int, ...]:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=2)))
        for move in moves(transport.rank // 2, 3):
            worker.step(move)
        bad = moves(transport.rank // 2, 1)[0]
        bad[290] = np.nan if transport.rank // 2 == 1 else 0
        worker.step(bad)
        with pytest.raises(NonFiniteError, match="are not finite"):
            worker.reducer.catch_up()
        return np.isfinite(worker.w).all()

    assert all(run_ranks(4, program))


def test_a_rank_alone_reads_what_all_share():
    """The others hold still, and need not hear of it."""
    def program(transport: Any) -> bool:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=2)))
        for step, move in enumerate(moves(transport.rank // 2, 6)):
            worker.step(move)
            if transport.rank == step % 4:
                with worker.reducer.shared():
                    seen = worker.p
                    assert worker.reducer.record() is not None
                assert same_bits(seen, worker.w)
        worker.reducer.catch_up()
        return worker.w.tobytes()

    assert len(set(run_ranks(4, program))) == 1


@pytest.mark.parametrize("options", [{}, {"overlap": False, "local_steps": 2}], ids=str)
def test_a_resumed_run_has_the_same_bits(options, tmp_path):
    def program(transport: Any) -> bool:
        chosen, own = StepAhead(replace(EXACT, hierarchical=2), **options), moves(transport.rank // 2, 12)
        worker = Worker(transport, chosen)
        for move in own[:7]:
            worker.step(move)
        checkpoint.save([worker.reducer], tmp_path / "state")
        resumed = Worker(transport, chosen)
        for values, shared in zip(resumed.parameters, np.split(worker.w, [200, 203]), strict=True):
            values[:] = shared
        checkpoint.load(resumed.reducer, 0, tmp_path / "state")
        for each in (worker, resumed):  # one after the other, as they have one transport
            for move in own[7:]:
                each.step(move)
            each.reducer.catch_up()
        return same_bits(worker.w, resumed.w) and same_bits(worker.p, resumed.p)

    assert all(run_ranks(4, program))


@pytest.mark.parametrize(("former", "former_host", "size", "host"), [
    (4, 2, 4, 1), (4, 1, 4, 2), (4, 2, 4, 4), (6, 3, 4, 2), (2, 1, 6, 3), (4, 2, 2, 1), (4, 2, 2, 2)])
@pytest.mark.parametrize("average", [True, False])
def test_another_shape_keeps_the_sum(former, former_host, size, host, average, tmp_path):
    """Of all ranks' residuals, if these are averaged: so what they do to w stays, where the ranks are as many. Of the
    workers', if they are added up."""
    def before(transport: Any) -> Any:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=former_host), ahead=0.5), average=average)
        for move in moves(transport.rank // former_host, 5):
            worker.step(move)
        checkpoint.save([worker.reducer], tmp_path / "state")
        return worker.w.copy(), (worker.w - worker.p).astype(np.float64)

    held = run_ranks(former, before)

    def after(transport: Any) -> Any:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=host), ahead=0.5), average=average)
        for values, shared in zip(worker.parameters, np.split(held[0][0], [200, 203]), strict=True):
            values[:] = shared
        checkpoint.load(worker.reducer, 0, tmp_path / "state")
        worker.reducer.begin_step()
        return (worker.w - worker.p).astype(np.float64)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_ranks(size, after)
    expected = sum(residual for _, residual in held[::1 if average else former_host])
    assert np.abs(expected).max() > 0.1
    assert np.allclose(sum(found[::1 if average else host]), expected, atol=1e-5)
    assert all(same_bits(each, found[rank - rank % host]) for rank, each in enumerate(found))
