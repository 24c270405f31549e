"""Step-ahead error feedback where each host is one worker, whose ranks take the same steps."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from horovod_oktopk import AgreementError, GaussianK, GTopk, OkTopk, StepAhead, TopkA, TopkDSA
from horovod_oktopk.state import gather
from tests.support.simulation import same_bits
from tests.support.threads import run_ranks

from .test_mode import ZEROS, Worker, moves

EXACT = OkTopk(density=0.05, region_interval=5, value_dtype=None)
SHAPES = [(1, 3), (2, 2), (3, 2), (2, 3)]


def run(hosts: int, ranks_per_host: int, scheme: Any, steps: int = 12, **options: Any) -> list[list[Any]]:
    """Return by rank w, p and the report after each step; each rank moves as its host does."""
    if ranks_per_host > 1:
        scheme = replace(scheme, hierarchical=ranks_per_host)

    def program(transport: Any) -> list[Any]:
        worker, found = Worker(transport, StepAhead(scheme, **options)), []
        for move in moves(transport.rank // ranks_per_host, steps):
            worker.step(move)
            found.append((worker.w.copy(), worker.p, worker.reducer.report))
        worker.reducer.catch_up()
        return [*found, (worker.w, worker.p, worker.reducer.report)]

    return run_ranks(hosts * ranks_per_host, program)


@pytest.mark.parametrize(("hosts", "ranks_per_host"), SHAPES)
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"local_steps": 3, "ahead": 0.7}], ids=str)
def test_where_all_sums_are_kept_the_bits_are_those_of_one_rank_a_host(hosts, ranks_per_host, options):
    """One host: those of a host of two ranks, as one rank alone compresses nothing."""
    flat = run(hosts, 1 if hosts > 1 else 2, EXACT, **options)
    for rank, found in enumerate(run(hosts, ranks_per_host, EXACT, **options)):
        for (w, p, _), (expected_w, expected_p, _) in zip(found, flat[rank // ranks_per_host], strict=True):
            assert same_bits(w, expected_w)
            assert same_bits(p, expected_p)


@pytest.mark.parametrize(("hosts", "ranks_per_host"), SHAPES)
@pytest.mark.parametrize("scheme", [
    OkTopk(density=0.05, global_density=None), OkTopk(density=0.05, selection="reuse", global_density=0.1),
    TopkA(density=0.05), TopkDSA(density=0.05), GTopk(density=0.05), GaussianK(density=0.05)], ids=repr)
def test_with_every_scheme_the_ranks_of_a_host_stay_alike(hosts, ranks_per_host, scheme):
    by_rank = run(hosts, ranks_per_host, scheme)
    for rank, found in enumerate(by_rank):
        first = by_rank[rank - rank % ranks_per_host]
        for (w, p, report), (first_w, first_p, _), (shared, _, _) in zip(found, first, by_rank[0], strict=True):
            assert same_bits(w, first_w)
            assert same_bits(p, first_p)
            assert same_bits(w, shared)
            assert report is None or report.local_selected > 0


def test_nothing_but_agreement_leaves_the_host():
    """Traffic that stays on the host is counted apart."""
    for *_, (_, _, report) in run(1, 3, EXACT):
        assert report.payload_bytes()[0] == 0
        assert report.bytes_sent <= 128
        assert report.phases["host_gather"].bytes_sent > 0


@pytest.mark.parametrize("late", [0, 1, 3])
def test_ranks_of_a_host_that_drift_apart_are_told(late):
    def program(transport: Any) -> str:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=2)))
        worker.take(moves(transport.rank // 2, 3))
        move = moves(7 if transport.rank == late else transport.rank // 2, 1, scale=3.0)[0]
        with pytest.raises(AgreementError, match="which all ranks of a host must change alike") as raised:  # noqa: PT012
            worker.step(move)
            worker.reducer.catch_up()
        return str(raised.value)

    [message] = set(run_ranks(4, program))
    assert "'nothing'" in message, "a host whose ranks agree says nothing of it, and no other line is compared"


@pytest.mark.parametrize(("former", "former_host", "size", "host"), [
    (4, 1, 2, 1), (4, 2, 4, 1), (4, 1, 4, 2), (4, 2, 4, 4), (6, 3, 4, 2), (2, 1, 6, 3), (4, 2, 2, 1), (4, 2, 2, 2)])
@pytest.mark.parametrize("average", [True, False])
def test_another_shape_keeps_the_mean_or_the_sum(former, former_host, size, host, average, tmp_path):
    """Average keeps the mean of all ranks' residuals, and Sum the workers' sum: what they do to w."""
    def before(transport: Any) -> Any:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=former_host), ahead=0.5), average=average)
        worker.take(moves(transport.rank // former_host, 5))
        gather.save([worker.reducer], tmp_path / "state")
        return worker.w.copy(), (worker.w - worker.p).astype(np.float64)

    held = run_ranks(former, before)

    def after(transport: Any) -> Any:
        worker = Worker(transport, StepAhead(replace(EXACT, hierarchical=host), ahead=0.5), average=average)
        for values, shared in zip(worker.parameters, np.split(held[0][0], [200, 203]), strict=True):
            values[:] = shared
        gather.load(worker.reducer, 0, tmp_path / "state")
        worker.reducer.begin(ZEROS)
        return (worker.w - worker.p).astype(np.float64)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_ranks(size, after)
    assert any("still moves the model as far" in str(each.message) for each in caught) == (size != former)
    expected, kept = [residual for _, residual in held], found
    if average:
        expected, kept = np.mean(expected, axis=0), np.mean(kept, axis=0)
    else:
        expected, kept = np.sum(expected[::former_host], axis=0), np.sum(kept[::host], axis=0)
    assert np.abs(expected).max() > 0.05
    assert np.allclose(kept, expected, atol=1e-5)
    assert all(same_bits(each, found[rank - rank % host]) for rank, each in enumerate(found))
