"""The roll call: ranks that differ all raise the same clear error; ranks at different steps go on together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from horovod_oktopk import OkTopk
from horovod_oktopk.errors import AgreementError
from horovod_oktopk.phases import agreement
from horovod_oktopk.phases.agreement import Attendance, roll_call
from horovod_oktopk.schemes.algorithm import Memory
from horovod_oktopk.schemes.step import reduce
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.threads import run_ranks

from ..schemes.test_conservation import assert_lawful
from ..support.gradients import Case
from ..support.oracle import oracle_step
from ..support.simulation import Rank, advance, dense, new_ranks, same_bits

N = 50


def messages(describe, k_of, size=3):
    """Return by rank the message of the error when all reduce together; None if there is no error."""
    def program(transport):
        acc = NumpyAccumulator(N)
        finite = acc.accumulate([(0, np.arange(N, dtype=np.float32))])
        said = Attendance(describe(transport.rank), k_of(transport.rank), finite=finite)
        try:
            reduce(OkTopk().algorithm(), acc, said, Memory(), CountingTransport(transport))
        except AgreementError as error:
            return str(error)
        return None

    return run_ranks(size, program, timeout=5)


def told_alike(describe, k_of, size=3):
    """Return the one message that all ranks get."""
    (message,) = set(messages(describe, k_of, size))
    return message


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_all_ranks_hear_the_same_about_a_different_description(odd):
    told = told_alike(lambda rank: f"density: 0.1\nshape of w: {[4, 5] if rank == odd else [5, 4]}", lambda rank: 5)
    for words in ("shape of w: [4, 5]", "shape of w: [5, 4]", f"rank {odd}"):
        assert words in told
    assert "density: 0.1" not in told


def test_all_ranks_hear_the_same_about_a_different_k():
    told = told_alike(lambda rank: "same: yes", lambda rank: 7 if rank == 1 else 5)
    assert "rank 0 has 'k: 5', rank 1 has 'k: 7'" in told
    assert "rank 2" not in told


@pytest.mark.parametrize("odd_k", [5, 3], ids=["the same k", "another k because of it"])
def test_a_missing_entry_is_named(odd_k):
    told = told_alike(lambda rank: "a: 1" if rank == 2 else "a: 1\nb: 2", lambda rank: odd_k if rank == 2 else 5)
    assert "rank 0 has 'b: 2', rank 2 has 'nothing'" in told


def test_many_differing_ranks_give_a_short_message():
    assert "and 4 more ranks" in told_alike(lambda rank: f"name: {rank}", lambda rank: 5, size=9)


def test_ranks_that_agree_hear_nothing():
    assert messages(lambda rank: "same: yes", lambda rank: 5) == [None] * 3


def settle(case, steps, **options):
    ranks = new_ranks(case.size, case.n, **options)
    advance(ranks, case.gradients()[:steps], case.k)
    return ranks


@pytest.mark.parametrize("newcomer", [0, 1, 3])
def test_a_newcomer_takes_the_step_of_rank_0_and_all_re_evaluate(newcomer):
    """A fresh rank 0 sets the others back to its own step; any other is taken along."""
    case = Case("normal", 200, 20, 4, 8, seed=2)
    options = {"selection": "reuse", "threshold_interval": 100, "region_interval": 100}
    ranks = settle(case, 3, **options)
    ranks[newcomer] = Rank(OkTopk(**options).algorithm(), NumpyAccumulator(case.n))
    run = advance(ranks, case.gradients()[3:], case.k)
    assert_lawful(run, case.k)
    assert [record.report.step for record in run[0]] == [1 if newcomer == 0 else 4] * case.size
    assert all(record.report.repartitioned and record.report.global_selected == case.k for record in run[0])
    assert not any(record.report.repartitioned for record in run[1])


def test_ranks_at_different_steps_reduce_exactly_as_thresholds_are_exact():
    case = Case("normal", 200, 20, 3, 4, seed=4)
    ranks = settle(case, 2)
    ranks[2].memory = replace(ranks[2].memory, step=17)
    records = advance(ranks, case.gradients()[2:3], case.k)[0]
    update, _, _ = oracle_step([record.acc for record in records], case.k)
    assert same_bits(dense(records[0].update, case.n), update)
    assert {record.report.step for record in records} == {3}


def test_ranks_that_hold_the_state_of_different_steps_re_evaluate_together():
    """Checkpoints of different age lead to this: each rank by itself would reuse what it holds."""
    case = Case("steady", 200, 20, 3, 4, seed=4)
    ranks = settle(case, 2, selection="reuse", threshold_interval=100, region_interval=100)
    ranks[2].memory = replace(ranks[2].memory, step=17)
    before = ranks[0].memory.threshold
    run = advance(ranks, case.gradients()[2:3], case.k)
    assert_lawful(run, case.k)
    assert all(record.report.repartitioned and record.report.global_threshold != before for record in run[0])


def test_ranks_that_hold_the_state_of_different_runs_re_evaluate_together():
    """A stale file on one host leads to this: without a comparison, each rank would send to other owners."""
    case = Case("steady", 200, 20, 3, 4, seed=4)
    ranks, others = (settle(each, 2, selection="reuse", threshold_interval=100, region_interval=100)
                     for each in (case, Case("steady", 200, 20, 3, 4, seed=5)))
    assert ranks[2].memory.step == others[2].memory.step
    assert (ranks[2].memory.boundaries != others[2].memory.boundaries).any()
    ranks[2].memory = others[2].memory
    run = advance(ranks, case.gradients()[2:3], case.k)
    assert_lawful(run, case.k)
    assert all(record.report.repartitioned for record in run[0])


@pytest.fixture
def many_ranks(monkeypatch):
    """Let few ranks agree as many do: they send one word of a digest as long as all are equal."""
    monkeypatch.setattr(agreement, "FEW_RANKS", 1)


@pytest.mark.usefixtures("many_ranks")
def test_many_ranks_hear_the_same_about_what_differs():
    test_a_missing_entry_is_named(5)
    test_ranks_that_agree_hear_nothing()


@pytest.mark.usefixtures("many_ranks")
@pytest.mark.parametrize("late", [None, 0, 2])
def test_many_ranks_hear_who_is_not_finite_and_whether_all_are_in_sync(late):
    def program(transport):
        rank = transport.rank
        mine = Attendance("same: yes", 5, step=7 + (rank == late), finite=rank != 1, memory=9,
                          counts=10 * rank + np.arange(3))
        call = roll_call(mine, CountingTransport(transport))
        return call.step, call.not_finite, call.in_sync, call.counts.tolist()

    for rank, (step, not_finite, in_sync, counts) in enumerate(run_ranks(3, program)):
        assert step == (8 if late == 0 else 7)
        assert (not_finite, in_sync) == ((1,), late is None)
        assert counts == [[rank], [10 + rank], [20 + rank]]
