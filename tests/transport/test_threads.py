"""Ranks as threads: the conformance programs, and what happens when a rank fails."""

from __future__ import annotations

import time
from itertools import chain

import numpy as np
import pytest

from horovod_oktopk.errors import TransportError
from horovod_oktopk.transport.base import rotated_batches
from tests.support.threads import run_ranks

from .programs import PROGRAMS, WITH_SIGNALS


@pytest.mark.parametrize("size", range(2, 6))
@pytest.mark.parametrize("program", PROGRAMS | WITH_SIGNALS)
def test_conformance(program, size):
    run_ranks(size, (PROGRAMS | WITH_SIGNALS)[program], timeout=20)


def row(transport):
    return transport.allgather(np.array([transport.rank], np.int64))


@pytest.mark.parametrize("bad", [0, 2])
def test_one_rank_that_raises_ends_all_with_its_error(bad):
    def program(transport):
        row(transport)
        if transport.rank == bad:
            raise KeyError("of rank", bad)
        row(transport)

    start = time.monotonic()
    with pytest.raises(KeyError, match="of rank"):
        run_ranks(3, program, timeout=20)
    assert time.monotonic() - start < 5


def test_one_rank_that_raises_ends_those_that_wait_for_a_signal():
    def program(transport):
        if transport.rank == 1:
            raise KeyError("of rank", 1)
        while transport.signals().receive(0.01) is None:
            pass

    with pytest.raises(KeyError, match="of rank"):
        run_ranks(2, program, timeout=5)


def test_a_rank_that_never_arrives_ends_the_others_in_time():
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"did not arrive within 0\.3 s"):
        run_ranks(3, lambda transport: None if transport.rank == 1 else row(transport), timeout=0.3)
    assert time.monotonic() - start < 5


def test_an_allgatherv_of_other_sizes_than_announced_is_refused():
    def program(transport):
        transport.allgatherv(np.zeros(3 + transport.rank, np.uint8), np.array([3, 3], np.int64))

    with pytest.raises(TransportError, match="rank 1 sent 4 bytes; 3 were announced"):
        run_ranks(2, program, timeout=5)


@pytest.mark.parametrize(("sent", "expected"), [(8, 4), (8, 12), (8, 0), (0, 8)])
def test_an_exchange_of_other_sizes_than_expected_is_refused(sent, expected):
    def program(transport):
        outgoing = {1: np.zeros(sent, np.uint8)} if transport.rank == 0 and sent else {}
        list(transport.send_and_receive(outgoing, {0: expected} if transport.rank and expected else {}))

    with pytest.raises(TransportError, match=f"rank 0 sent {sent} bytes to rank 1, which expected {expected}"):
        run_ranks(2, program, timeout=5)


@pytest.mark.parametrize("messages_in_flight", [1, 2, 3, 100])
@pytest.mark.parametrize("size", range(1, 8))
def test_rotated_steps_give_each_rank_one_sender_and_reach_all(size, messages_in_flight):
    schedules = [list(rotated_batches(rank, size, messages_in_flight)) for rank in range(size)]
    for rank, batches in enumerate(schedules):
        assert all(len(batch) <= messages_in_flight for batch in batches)
        assert sorted(to for batch in batches for to, _ in batch) == [to for to in range(size) if to != rank]
    for step in zip(*[chain(*batches) for batches in schedules], strict=True):
        assert sorted(to for to, _ in step) == list(range(size))
        assert all(step[source][0] == rank for rank, (_, source) in enumerate(step))
