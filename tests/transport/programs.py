"""Contract of every transport, as programs: plain functions that each rank calls with its transport.

A program asserts inside. The same list is run over threads, over MPI, and by any further transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from horovod_oktopk.modes.partial.rounds import PartialAllreduce
from horovod_oktopk.transport.base import DIRECT_RANKS, Transport


def _message(source: int, to: int, length: int, salt: int = 0) -> np.ndarray:
    """Return bytes that differ by sender, receiver and place, so that no mix-up goes unnoticed."""
    return ((np.arange(length) * 7 + source * 31 + to * 101 + salt) % 251).astype(np.uint8)


def _exchange(transport: Transport, words: Callable[[int, int], int], messages_in_flight: int,
              salt: int = 0) -> None:
    """Exchange messages of words(source, to) words of 4 bytes, and compare what comes."""
    transport.messages_in_flight = messages_in_flight  # of no effect on a transport that sends all in one batch
    rank, others = transport.rank, [rank for rank in range(transport.size) if rank != transport.rank]
    outgoing = {to: _message(rank, to, 4 * words(rank, to), salt) for to in others if words(rank, to)}
    incoming = {source: 4 * words(source, rank) for source in others if words(source, rank)}
    came = [pair for batch in transport.send_and_receive(outgoing, incoming) for pair in batch]
    assert sorted(source for source, _ in came) == sorted(incoming), "each source answers once"
    for source, message in came:
        assert message.dtype == np.uint8
        assert np.array_equal(message, _message(source, rank, 4 * words(source, rank), salt)), f"from {source}"


def _allgatherv(transport: Transport, length: Callable[[int], int], salt: int = 0) -> None:
    sizes = np.array([length(rank) for rank in range(transport.size)], np.int64)
    came = transport.allgatherv(_message(transport.rank, 0, length(transport.rank), salt), sizes)
    assert len(came) == transport.size
    for source, message in enumerate(came):
        assert message.dtype == np.uint8
        assert np.array_equal(message, _message(source, 0, length(source), salt)), f"from {source}"


def _ragged(source: int, to: int) -> int:
    """Return a number of words; some messages are empty."""
    return 0 if (source + 2 * to) % 4 == 0 else 13 * source + 5 * to + 1


def knows_its_place(transport: Transport) -> None:
    assert 0 <= transport.rank < transport.size
    ranks = transport.allgather(np.array([transport.rank], np.int64))
    assert ranks[:, 0].tolist() == list(range(transport.size))


def allgather_keeps_rank_order(transport: Transport) -> None:
    rows = transport.allgather(np.array([transport.rank, 2**62 - transport.rank, -1], np.int64))
    assert rows.dtype == np.int64
    assert rows.tolist() == [[rank, 2**62 - rank, -1] for rank in range(transport.size)]


def allgather_takes_strided_rows(transport: Transport) -> None:
    row = (np.arange(10, dtype=np.int64) + transport.rank)[::3]
    assert transport.allgather(row).tolist() == [[rank, 3 + rank, 6 + rank, 9 + rank]
                                                 for rank in range(transport.size)]


def alltoall_gives_every_rank_its_rows(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    rows = np.array([[rank, to, 2**62 - rank] for to in range(size)], np.int64)
    kept = rows.copy()
    came = transport.alltoall(rows)
    assert came.dtype == np.int64
    assert came.tolist() == [[source, rank, 2**62 - source] for source in range(size)]
    assert np.array_equal(rows, kept)


def alltoall_takes_strided_rows(transport: Transport) -> None:
    rows = np.arange(4 * transport.size, dtype=np.int64).reshape(transport.size, 4)[:, ::2] + transport.rank
    assert transport.alltoall(rows).tolist() == [[4 * transport.rank + rank, 4 * transport.rank + 2 + rank]
                                                 for rank in range(transport.size)]


def alltoall_in_two_rounds(transport: Any) -> None:
    """Exchange as many ranks do, if a transport's own alltoall is of that kind."""
    transport.direct_ranks = 1
    alltoall_gives_every_rank_its_rows(transport)
    alltoall_takes_strided_rows(transport)
    transport.direct_ranks = DIRECT_RANKS


def allreduce_sums_beyond_32_bits(transport: Transport) -> None:
    total = transport.allreduce(np.array([transport.rank, 2**40, -3], np.int64))
    size = transport.size
    assert total.dtype == np.int64
    assert total.tolist() == [size * (size - 1) // 2, size * 2**40, -3 * size]


def allreduce_of_a_histogram(transport: Transport) -> None:
    mine = np.arange(256, dtype=np.int64) * (transport.rank + 1)
    factor = transport.size * (transport.size + 1) // 2
    assert np.array_equal(transport.allreduce(mine), np.arange(256) * factor)


def inputs_stay_as_they_were(transport: Transport) -> None:
    counts, message = np.arange(5, dtype=np.int64), _message(transport.rank, 0, 9)
    transport.allgather(counts)
    transport.allreduce(counts)
    transport.allgatherv(message, np.full(transport.size, 9, np.int64))
    assert counts.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(message, _message(transport.rank, 0, 9))


def results_are_not_shared_between_calls(transport: Transport) -> None:
    first = transport.allgatherv(_message(transport.rank, 0, 20), np.full(transport.size, 20, np.int64))
    transport.allgatherv(_message(transport.rank, 1, 20), np.full(transport.size, 20, np.int64))
    for source, message in enumerate(first):
        assert np.array_equal(message, _message(source, 0, 20))


def exchanges_back_to_back(transport: Transport) -> None:
    """Let ranks run ahead of each other; a message of one round must not be taken for the next one's."""
    for turn in range(30):
        _exchange(transport, lambda source, to: 11 + source, 1 + turn % 3, salt=turn)


def everything_back_to_back(transport: Transport) -> None:
    for turn in range(20):
        knows_its_place(transport)
        _exchange(transport, _ragged, 2, salt=turn)
        allreduce_sums_beyond_32_bits(transport)
        _allgatherv(transport, lambda rank: 5 * rank, salt=turn)


def signals_come_from_everyone_once_and_in_order(transport: Any) -> None:
    """Send signals of all 64 bits while collectives go on, and to oneself as well."""
    signals, received = transport.signals(), []
    for number in range(-5, 5):
        for to in range(transport.size):
            signals.send(to, 2**40 * number + transport.rank)
        knows_its_place(transport)
    while len(received) < 10 * transport.size:
        number = signals.receive(10.0)
        assert number is not None, f"only {len(received)} have come"
        received.append(number)
    for source in range(transport.size):
        assert [n // 2**40 for n in received if n % 2**40 == source] == list(range(-5, 5))
    assert signals.receive(0.01) is None
    knows_its_place(transport)  # or a rank would send to one that still looks for nothing


def signals_from_other_threads(transport: Any) -> None:
    signals = transport.signals()
    senders = [threading.Thread(target=signals.send, args=((transport.rank + 1) % transport.size, number))
               for number in range(8)]
    for sender in senders:
        sender.start()
    received = {signals.receive(10.0) for _ in senders}
    for sender in senders:
        sender.join()
    assert received == set(range(8))
    knows_its_place(transport)


def partial_rounds_while_another_thread_trains(transport: Any) -> None:
    """Assert that every number that a rank hands in is in one round, which all ranks see alike."""
    handed_in: list[int] = []

    def run(is_active: bool, settings: tuple[float, ...]) -> int:
        assert 0 <= settings[0] < transport.size
        mine, handed_in[:] = (sum(handed_in), []) if is_active else (0, handed_in[:])
        return int(transport.allgather(np.array([mine], np.int64)).sum())

    def contribute() -> list[float]:
        handed_in.append(1 << (4 * transport.rank))
        return [transport.rank]

    for policy in ("solo", "majority"):
        reduction, rounds = PartialAllreduce(policy, run, transport, transport.signals(), settings=1), []
        for _ in range(10):
            time.sleep(0.001 * transport.rank)
            rounds += reduction.arrive(contribute)
        for some in reduction.synchronize(for_good=True):
            rounds += some
        reduction.end()
        expected = 10 * sum(1 << (4 * rank) for rank in range(transport.size))
        assert sum(each.outcome or 0 for each in rounds) == expected
        seen = transport.allgather(np.array([len(rounds), *rounds[-1].presences], np.int64))
        assert (seen == seen[0]).all()


EXCHANGES: dict[str, tuple[Callable[[int, int], int], int]] = {
    "ragged_one_by_one": (_ragged, 1), "ragged_in_buckets_of_two": (_ragged, 2), "ragged_all_at_once": (_ragged, 100),
    "nothing": (lambda source, to: 0, 2), "the_first_alone_sends": (lambda source, to: 0 if source else 50, 2),
    "the_first_alone_receives": (lambda source, to: 0 if to else 50, 1),
    "megabytes": (lambda source, to: 2**20 + source + to, 2)}
"""Words, and messages in flight. Megabytes are past what any network buffers: all send before they receive."""
GATHERED: dict[str, Callable[[int], int]] = {
    "ragged": lambda rank: 17 * rank + 3, "some_empty": lambda rank: 9 * (rank % 2), "nothing": lambda rank: 0,
    "megabytes": lambda rank: 2**22 + rank}
"""Bytes of a rank's message."""

PROGRAMS: dict[str, Callable[[Transport], None]] = {
    **{program.__name__: program for program in (
        knows_its_place, allgather_keeps_rank_order, allgather_takes_strided_rows,
        alltoall_gives_every_rank_its_rows, alltoall_takes_strided_rows, alltoall_in_two_rounds,
        allreduce_sums_beyond_32_bits, allreduce_of_a_histogram, inputs_stay_as_they_were,
        results_are_not_shared_between_calls, exchanges_back_to_back, everything_back_to_back)},
    **{f"exchange_{name}": partial(_exchange, words=words, messages_in_flight=flying)
       for name, (words, flying) in EXCHANGES.items()},
    **{f"allgatherv_{name}": partial(_allgatherv, length=length) for name, length in GATHERED.items()}}
WITH_SIGNALS: dict[str, Callable[[Any], None]] = {program.__name__: program for program in (
    signals_come_from_everyone_once_and_in_order, signals_from_other_threads,
    partial_rounds_while_another_thread_trains)}
"""Programs of transports that have signals."""
