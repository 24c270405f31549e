"""A step-ahead state, saved and loaded: by the same ranks, by others, and when the ranks change."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk import OkTopk, StepAhead, TopkA
from horovod_oktopk.transport.local import run_ranks

from ..support.simulation import same_bits
from .test_reducer import ENTRIES, Worker, moves, train


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("prefix", ["", "another_"])
@pytest.mark.parametrize("scheme", [OkTopk(density=0.05), TopkA(density=0.05)], ids=str)
@pytest.mark.filterwarnings("ignore:the checkpoint has other names")
def test_a_resumed_run_has_the_bits_of_one_that_only_saved(scheme, prefix, inside):
    """Whatever the parameters are called then: which rank owns an element tells who keeps what rounding left over."""
    options = StepAhead(scheme, local_steps=2)
    renamed = [(prefix + name, *rest) for name, *rest in ENTRIES]

    def program(transport):
        first, second = Worker(transport, options), Worker(transport, options, entries=renamed)
        mine = moves(transport.rank, 13)
        for move in mine[:7]:
            first.step(move)
        if inside:
            with first.reducer.shared():
                record = first.reducer.record()
                second.parameters = [own.copy() for own in first.parameters]
        else:
            record = first.reducer.record()
            with first.reducer.shared():
                second.parameters = [own.copy() for own in first.parameters]
        second.reducer.load([record])
        for worker in (first, second):
            for move in mine[7:]:
                worker.step(move)
            worker.reducer.catch_up()
        return same_bits(first.w, second.w) and same_bits(first.p, second.p)

    assert run_ranks(2, program) == [True, True]


def test_a_state_taken_by_other_ranks_keeps_the_sum_of_what_was_not_sent():
    before = train(4)
    records = [worker.reducer.record() for worker in before]
    missing = sum((worker.w.astype(np.float64) - worker.p) for worker in before) / before[0].reducer.coefficient

    def program(transport):
        worker = Worker(transport)
        with before[0].reducer.shared():
            worker.parameters = [own.copy() for own in before[0].parameters]
        with pytest.warns(UserWarning, match="the sum of the residuals is kept"):
            worker.reducer.load(records)
        worker.reducer.begin_step()
        return (worker.w.astype(np.float64) - worker.p) / worker.reducer.coefficient

    assert np.allclose(sum(run_ranks(2, program)), missing, atol=1e-4)


def test_a_model_saved_with_a_ranks_own_parameters_drops_the_residual_with_a_warning():
    before = train(2)
    record = before[0].reducer.record()

    def program(transport):
        worker = Worker(transport)
        worker.parameters = [own.copy() for own in before[0].parameters]
        worker.reducer.load([record])
        with pytest.warns(UserWarning, match="inside shared_parameters"):
            worker.reducer.begin_step()
        return same_bits(worker.p, worker.w)

    assert run_ranks(1, program) == [True]


def test_when_the_ranks_change_what_was_not_sent_stays_and_the_model_goes_on_from_what_they_share():
    def program(transport):
        worker = Worker(transport)
        for move in moves(transport.rank, 5):
            worker.step(move)
        worker.reducer.catch_up()
        own, shared = worker.p, worker.w.copy()
        worker.network.resets += 1
        worker.reducer.begin_step()
        return same_bits(worker.w, shared) and np.allclose(worker.p, own, atol=1e-6)

    assert run_ranks(2, program) == [True, True]
