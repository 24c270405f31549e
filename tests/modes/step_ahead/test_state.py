"""A step-ahead state, saved and loaded: by the same ranks, by others, and when the ranks change."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from horovod_oktopk import AgreementError, OkTopk, PluginError, SameBlocks, StepAhead, TopkA, TransportError
from horovod_oktopk.state import gather
from horovod_oktopk.transport.base import broadcast
from tests.support.simulation import same_bits
from tests.support.threads import ThreadTransport, run_ranks

from .test_mode import ENTRIES, ZEROS, Worker, moves


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
        first.take(mine[:7])
        if inside:
            with first.reducer.shared():
                record = first.reducer.records()[0]
                second.parameters = [own.copy() for own in first.parameters]
        else:
            record = first.reducer.records()[0]
            with first.reducer.shared():
                second.parameters = [own.copy() for own in first.parameters]
        second.reducer.load([record])
        for worker in (first, second):
            worker.take(mine[7:])
            worker.reducer.catch_up()
        return same_bits(first.w, second.w) and same_bits(first.p, second.p)

    assert run_ranks(2, program) == [True, True]


def test_a_model_saved_with_a_ranks_own_parameters_drops_the_residual_with_a_warning():
    def before(transport):
        worker = Worker(transport)
        worker.take(moves(transport.rank, 12))
        return worker.reducer.records()[0], worker.parameters

    record, saved = run_ranks(2, before)[0]

    def program(transport):
        worker = Worker(transport)
        worker.parameters = [own.copy() for own in saved]
        worker.reducer.load([record])
        with pytest.warns(UserWarning, match="inside shared_parameters"):
            worker.reducer.begin(ZEROS)
        return same_bits(worker.p, worker.w)

    assert run_ranks(1, program) == [True]


class SlowTransport(ThreadTransport):
    """Whose exchanges in a thread are still under way when the program goes on.

    fails: as if a rank was lost. has_met: whether two threads of the rank have communicated at once.
    """

    def __init__(self, transport: ThreadTransport) -> None:
        super().__init__(transport._world, transport.rank)
        self.fails = self.has_met = False
        self._inside = threading.Lock()

    @contextmanager
    def _alone(self):
        if not self._inside.acquire(blocking=False):
            self.has_met = True
            raise TransportError("two threads communicate at once")
        try:
            if threading.current_thread().name.startswith("horovod_oktopk"):
                time.sleep(0.02)
                if self.fails:
                    raise TransportError("a rank was lost")
            yield
        finally:
            self._inside.release()

    def allgather(self, row):
        with self._alone():
            return super().allgather(row)

    def allgatherv(self, message, sizes):
        with self._alone():
            return super().allgatherv(message, sizes)


@pytest.mark.parametrize("options", [StepAhead(OkTopk(density=0.05)), StepAhead(TopkA(density=0.05))], ids=str)
def test_a_state_may_be_loaded_while_an_exchange_is_under_way(options):
    """It is waited for, and what it gives is dropped: no message of it meets one of the next step's."""
    def trained(inside):
        def program(transport):
            worker = Worker(SlowTransport(transport), options)
            mine = moves(transport.rank, 4)
            worker.take(mine)
            with worker.reducer.shared():
                record, saved = worker.reducer.records()[0], [own.copy() for own in worker.parameters]
            for _ in range(3):
                worker.take(mine)
                time.sleep(0.005)  # the thread begins
                if inside:
                    with worker.reducer.shared():
                        worker.parameters = [own.copy() for own in saved]
                        worker.reducer.load([record])
                else:
                    worker.reducer.load([record])
                    worker.parameters = [own.copy() for own in saved]
            worker.take(mine)
            worker.reducer.catch_up()
            assert not worker.ranks.base.has_met
            return worker

        return run_ranks(2, program)

    for one, other in zip(trained(inside=False), trained(inside=True), strict=True):
        assert same_bits(one.w, other.w)
        assert same_bits(one.p, other.p)


@pytest.mark.parametrize("under_way", ["nothing", "an exchange", "an exchange that fails"])
def test_when_the_ranks_change_what_was_not_sent_stays_and_what_is_under_way_is_waited_for(under_way):
    def program(transport):
        worker = Worker(SlowTransport(transport))
        mine = moves(transport.rank, 6)
        worker.take(mine[:3])
        worker.reducer.catch_up()
        shared, own = worker.w.copy(), worker.p
        if under_way != "nothing":
            worker.ranks.base.fails = under_way == "an exchange that fails"
            worker.step(mine[3])
            own -= worker.reducer.coefficient * mine[3]
        worker.ranks.resets += 1
        time.sleep(0.005)  # the thread begins
        worker.reducer.begin(ZEROS)
        worker.ranks.base.fails = False
        assert same_bits(worker.w, shared), "what it gave is dropped"
        assert np.allclose(worker.p, own, atol=1e-6), "what was not sent stays"
        worker.reducer.end()
        worker.take(mine[4:])
        worker.reducer.catch_up()
        assert not worker.ranks.base.has_met
        return worker

    workers = run_ranks(2, program)
    assert same_bits(workers[0].w, workers[1].w)


def test_a_rank_that_joins_exchanges_at_the_same_steps_as_the_others():
    """The others have taken a step since their last exchange when it comes."""
    def program(transport):
        options = StepAhead(OkTopk(density=0.05), local_steps=2)
        mine, has_trained = moves(transport.rank, 7), transport.rank < 2
        worker = Worker(transport.group([0, 1], "before") if has_trained else transport, options)
        if has_trained:
            worker.take(mine[:3])
            worker.reducer.suspend()
        for own in worker.parameters:
            own[:] = broadcast(own, transport)
        worker.ranks.join(transport)
        exchanges = []
        for move in mine[3:]:
            worker.step(move)
            worker.reducer.catch_up()
            exchanges.append(worker.reducer.reduction.memory.step)
        return (np.diff(exchanges) > 0).tolist(), worker.w

    workers = run_ranks(3, program)
    assert [exchanged for exchanged, _ in workers] == [[True, False, True]] * 3
    assert all(same_bits(w, workers[0][1]) for _, w in workers)


def test_a_rank_without_a_state_is_told_to_save_later():
    def program(transport):
        with pytest.raises(PluginError, match="no state to save: this rank has taken no step yet"):
            gather.records(Worker(transport, StepAhead(OkTopk(density=0.05))).reducer, "gather the state")

    run_ranks(2, program)


def test_no_rank_but_the_first_receives_what_others_save():
    """A record is long, as it has all blocks' turns."""
    n = 400 * 64

    def program(transport):
        worker = Worker(transport, StepAhead(SameBlocks()), entries=[("a", (n,), "float32")])
        worker.take(moves(transport.rank, 2, n=n))
        with worker.reducer.meeting("gather the state") as counted:
            before = sum(each.bytes_received for each in counted.phases.values())
            found = gather.records(worker.reducer, "gather the state")
            received = sum(each.bytes_received for each in counted.phases.values()) - before
        return [each["rank"] for each in found], received

    (everyone, of_first), *others = run_ranks(3, program)
    assert everyone == [0, 1, 2]
    assert of_first > 2 * (4 * n + 400 * 8)
    assert [found for found, _ in others] == [[1], [2]]
    assert max(received for _, received in others) < 2_000


@pytest.mark.parametrize(("does", "words"), [
    (lambda worker: worker.reducer.refuse_step("a parameter has changed"), "a parameter has changed"),
    (lambda worker: gather.records(worker.reducer, "gather it"), r"ranks \[0\] take a step, ranks \[1\] gather")])
def test_a_rank_that_does_something_else_before_the_first_step_is_named_on_all_ranks(does, words):
    def program(transport):
        worker = Worker(transport, StepAhead(OkTopk(density=0.05)))
        with pytest.raises(AgreementError, match=words):
            does(worker) if transport.rank else worker.take(moves(0, 1))

    run_ranks(2, program)
