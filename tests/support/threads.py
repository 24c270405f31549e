"""Ranks as threads of one process: for tests, benchmarks and simulations."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from horovod_oktopk.errors import TransportError
from horovod_oktopk.transport.base import (
    MESSAGES_IN_FLIGHT,
    Bytes,
    Counts,
    Signals,
    Transport,
    Values,
    rotated_batches,
)

T = TypeVar("T")

NOTHING: Bytes = np.empty(0, np.uint8)


class ThreadWorld:
    """Memory that the threads share: a slot for each rank, and a barrier that one failure breaks for all."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = size
        self.timeout = timeout
        self._slots: list[list[Any]] = [[None] * size, [None] * size]
        self._turns = [0] * size
        self._waiting: list[threading.Lock] = []  # a lock for each thread that waits; threading.Barrier is slower
        self._is_broken = False
        self._groups: dict[str, ThreadWorld] = {}
        self._lock = threading.Lock()
        self.signals: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(size)]

    def swap(self, rank: int, item: Any) -> list[Any]:
        """Return everyone's item, in rank order. Collective."""
        turn = self._turns[rank]
        self._turns[rank] = 1 - turn  # nobody writes into these slots again before all have read them
        self._slots[turn][rank] = item
        self._wait()
        return list(self._slots[turn])

    def group(self, name: str, size: int) -> ThreadWorld:
        """Return a world of some of the threads, which ends with this one."""
        with self._lock:
            return self._groups.setdefault(name, ThreadWorld(size, self.timeout))

    def abort(self) -> None:
        """End every rank that waits, or will wait, with TransportError."""
        with self._lock:
            self._is_broken = True
            self._wake()
            for world in self._groups.values():
                world.abort()

    def check(self) -> None:
        """Raise TransportError once a rank has failed."""
        if self._is_broken:
            raise TransportError(f"another rank failed, or did not arrive within {self.timeout} s")

    def _wait(self) -> None:
        """Return when all threads are here."""
        self.check()
        gate = None
        with self._lock:
            if len(self._waiting) == self.size - 1:
                self._wake()
            else:
                gate = threading.Lock()
                gate.acquire()
                self._waiting.append(gate)
        if gate is not None and not gate.acquire(timeout=self.timeout):
            self.abort()
        self.check()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.release()


class ThreadTransport(Transport):
    """One rank's end of a ThreadWorld."""

    concurrent = True
    messages_in_flight = MESSAGES_IN_FLIGHT

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self._world = world

    def signals(self) -> ThreadSignals:
        """Return signals of the same ranks."""
        return ThreadSignals(self._world, self.rank)

    def group(self, ranks: Sequence[int], name: str) -> ThreadTransport:
        """Return a transport among some of the ranks; messages under another name do not meet its own."""
        world = self._world.group(f"{name} of {list(ranks)}", len(ranks))
        return ThreadTransport(world, ranks.index(self.rank))

    def groups(self, ranks_per_host: int) -> tuple[ThreadTransport, ThreadTransport]:
        """Return transports as if a host had that many ranks in a row: one rank of each host; this host's ranks."""
        first, local = self.rank // ranks_per_host * ranks_per_host, self.rank % ranks_per_host
        return (self.group(range(local, self.size, ranks_per_host), "across"),
                self.group(range(first, first + ranks_per_host), "within"))

    def allgather(self, row: Counts) -> Counts:
        return np.stack(self._world.swap(self.rank, row.copy()))

    def alltoall(self, rows: Counts) -> Counts:
        return np.stack([sent[self.rank] for sent in self._world.swap(self.rank, rows.copy())])

    def allreduce(self, values: Values) -> Values:
        total: Values = np.sum(self._world.swap(self.rank, values.copy()), axis=0)
        return total

    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        assert not any(len(message) % 4 for message in outgoing.values()), "see Transport: messages are whole words"
        mailboxes = self._world.swap(self.rank, {to: message.copy() for to, message in outgoing.items()})
        for batch in rotated_batches(self.rank, self.size, self.messages_in_flight):
            arrived = [(source, mailboxes[source].get(self.rank, NOTHING)) for _, source in batch]
            for source, message in arrived:
                if len(message) != incoming.get(source, 0):
                    raise TransportError(f"rank {source} sent {len(message)} bytes to rank {self.rank}, "
                                         f"which expected {incoming.get(source, 0)}")
            yield [(source, message) for source, message in arrived if len(message)]

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        messages: list[Bytes] = self._world.swap(self.rank, message.copy())
        for source, size in enumerate(sizes):
            if len(messages[source]) != size:
                raise TransportError(f"rank {source} sent {len(messages[source])} bytes; {size} were announced")
        return messages


class ThreadSignals(Signals):
    """One rank's end of a ThreadWorld's signals."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    def send(self, to: int, number: int) -> None:
        self._world.signals[to].put(number)

    def receive(self, timeout: float) -> int | None:
        try:
            return self._world.signals[self._rank].get(timeout=timeout)
        except queue.Empty:
            self._world.check()
            return None


def run_ranks(size: int, program: Callable[[ThreadTransport], T], timeout: float = 30.0) -> list[T]:
    """Run program(transport) on `size` ranks; return their results in rank order.

    One rank's exception ends all, and is raised here (the cause, not the TransportErrors that follow).
    """
    world = ThreadWorld(size, timeout)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadTransport(world, rank))
        except BaseException as error:
            errors.append(error)
            world.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, TransportError)), errors[0])
    return results
