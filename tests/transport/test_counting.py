"""The counting transport: it changes nothing, and counts what crosses, by phase."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk.transport.counting import CountingTransport
from tests.support.threads import ThreadTransport, ThreadWorld, run_ranks

from .programs import PROGRAMS


def counted(size, program):
    """Return the traffic of every rank, by phase."""
    def run(transport):
        counting = CountingTransport(transport)
        program(counting)
        return counting.phases

    return run_ranks(size, run, timeout=20)


def totals(phases, name):
    return sum(getattr(traffic, name) for traffic in phases.values())


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("program", PROGRAMS)
def test_conformance_and_that_all_that_is_sent_is_received(program, size):
    ranks = counted(size, PROGRAMS[program])
    for what in ("bytes", "messages"):
        sent, received = (sum(totals(phases, f"{what}_{way}") for phases in ranks) for way in ("sent", "received"))
        assert sent == received
        assert sent > 0 or size == 1 or "nothing" in program


def only(size, program):
    return [(traffic.bytes_sent, traffic.bytes_received, traffic.messages_sent, traffic.messages_received)
            for phases in counted(size, program) for traffic in phases.values()]


def exchange(transport):
    outgoing = {1: np.zeros(8, np.uint8), 2: np.zeros(12, np.uint8)} if transport.rank == 0 else {}
    list(transport.send_and_receive(outgoing, {0: [0, 8, 12][transport.rank]} if transport.rank else {}))


def allgatherv(transport):
    sizes = np.array([1, 10, 100])
    transport.allgatherv(np.zeros(sizes[transport.rank], np.uint8), sizes)


@pytest.mark.parametrize(("program", "expected"), [
    pytest.param(lambda transport: transport.allgather(np.zeros(3, np.int64)), [(48, 48, 2, 2)] * 3, id="allgather"),
    pytest.param(lambda transport: transport.allreduce(np.zeros(6, np.int64)), [(64, 64, 4, 4)] * 3, id="allreduce"),
    pytest.param(allgatherv, [(101, 110, 2, 2), (11, 101, 2, 2), (110, 11, 2, 2)], id="allgatherv"),
    pytest.param(exchange, [(20, 0, 2, 0), (0, 8, 0, 1), (0, 12, 0, 1)], id="exchange")])
def test_collectives_are_counted_as_rings_and_an_exchange_as_it_is(program, expected):
    """An allreduce is a reduce-scatter and an allgather; an allgatherv sends all but the next one's block."""
    assert only(3, program) == expected


def test_phases_are_counted_apart_and_end_on_errors():
    def program(transport):
        with pytest.raises(KeyError), transport.phase("failed"):
            raise KeyError
        with transport.phase("outer"):
            transport.allgather(np.zeros(1, np.int64))
            with transport.phase("inner"):
                transport.allgather(np.zeros(2, np.int64))
            transport.allgather(np.zeros(4, np.int64))
        transport.allgather(np.zeros(8, np.int64))

    for phases in counted(2, program):
        assert {name: traffic.bytes_sent for name, traffic in phases.items()} == {
            "failed": 0, "inner": 16, "outer": 40, "agree": 64}


def test_a_reset_leaves_earlier_counts_to_their_holders():
    def program(transport):
        transport.allgather(np.zeros(1, np.int64))
        before = transport.phases
        transport.reset()
        transport.allgather(np.zeros(2, np.int64))
        assert before["agree"].bytes_sent == 8

    assert only(2, program) == [(16, 16, 1, 1)] * 2


def test_seconds_of_a_phase_inside_another_are_its_own(monkeypatch):
    readings = iter([0.0, 1.0, 4.0, 5.0, 9.0, 10.0])  # outer begins; inner begins and ends, twice; outer ends
    monkeypatch.setattr("horovod_oktopk.transport.counting.time.perf_counter", lambda: next(readings))
    counting = CountingTransport(ThreadTransport(ThreadWorld(1), 0))
    with counting.phase("outer"):
        for _ in range(2):
            with counting.phase("inner"):
                pass
    assert {name: traffic.seconds for name, traffic in counting.phases.items()} == {"inner": 7.0, "outer": 3.0}
