"""A gate lets every operation end that all ranks have begun, and none begin that will not end."""

from __future__ import annotations

import threading

import pytest

from horovod_oktopk.errors import TransportError
from horovod_oktopk.transport.mpi.gate import Gate


def do(gate: Gate, operations: int) -> None:
    for _ in range(operations):
        with gate.operation(), gate.inside():
            pass


def test_an_open_gate_counts_what_was_begun_and_done():
    gate = Gate()
    do(gate, 3)
    assert (gate.begun, gate.done, gate.waited()) == (3, 3, 0.0)
    assert not gate.is_quiet(0.0), "it is open, so an operation may begin"


def test_a_closed_gate_lets_nobody_in_and_says_why():
    gate = Gate()
    do(gate, 2)
    gate.close("rank 1 has ended")
    with pytest.raises(TransportError, match="rank 1 has ended"):
        do(gate, 1)
    with pytest.raises(TransportError, match="rank 1 has ended"), gate.moment():
        pass
    assert gate.is_quiet(0.0)


def test_operations_that_the_ended_rank_has_done_still_begin_and_end():
    gate = Gate()
    do(gate, 2)
    gate.close("rank 1 has ended", after=4)
    assert not gate.is_quiet(0.0), "two operations are to come"
    do(gate, 2)
    assert gate.is_quiet(0.0)
    with pytest.raises(TransportError):
        do(gate, 1)


def test_the_earliest_end_and_the_first_reason_count():
    gate = Gate()
    gate.close("first", after=3)
    gate.close("second", after=2)
    gate.close("third", after=5)
    do(gate, 2)
    with pytest.raises(TransportError, match="first"):
        do(gate, 1)


def test_whoever_waits_in_a_later_operation_is_stuck_and_one_in_an_earlier_is_not():
    gate = Gate()
    with gate.operation(), gate.inside():
        gate.close("rank 1 has ended", after=1)
        assert not gate.is_stuck
        assert not gate.is_quiet(0.0)
        gate.check()
    gate = Gate()
    with gate.operation(), gate.inside():
        gate.close("rank 1 has ended", after=0)
        assert gate.is_stuck
        with pytest.raises(TransportError, match="rank 1 has ended"):
            gate.check()
    assert not gate.is_stuck


def test_an_operation_that_failed_was_begun_and_not_done():
    gate = Gate()
    with pytest.raises(ValueError, match="broken"), gate.operation():
        raise ValueError("broken")
    assert (gate.begun, gate.done) == (1, 0)


def test_quiet_is_awaited():
    gate, entered, leave = Gate(), threading.Event(), threading.Event()

    def wait_inside() -> None:
        with gate.operation(), gate.inside():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=wait_inside)
    thread.start()
    entered.wait()
    gate.close("over")
    assert gate.waited() > 0
    assert not gate.is_quiet(0.01)
    leave.set()
    assert gate.is_quiet(10.0)
    thread.join()
    assert gate.idle() >= 0
