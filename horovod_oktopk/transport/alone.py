"""A job of one rank: a Transport that sends nothing."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping

from ..errors import TransportError
from .base import Bytes, Counts, Values


class AloneTransport:
    """The transport of a single rank; see Transport."""

    rank, size, concurrent = 0, 1, True

    def signals(self) -> AloneSignals:
        """Return this rank's own numbers."""
        return AloneSignals()

    def allgather(self, row: Counts) -> Counts:
        return row[None].copy()

    def alltoall(self, rows: Counts) -> Counts:
        return rows.copy()

    def allreduce(self, values: Values) -> Values:
        return values.copy()

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 ) -> Iterator[list[tuple[int, Bytes]]]:
        if outgoing or incoming:
            raise TransportError(f"a single rank exchanges no messages; got some to {sorted(outgoing)} and from "
                                 f"{sorted(incoming)}")
        return iter(())

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        if len(message) != sizes[0]:
            raise TransportError(f"{sizes[0]} bytes were announced; got {len(message)}")
        return [message.copy()]


class AloneSignals:
    """The numbers that a single rank sends itself; see Signals."""

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[int] = queue.SimpleQueue()

    def send(self, _to: int, number: int) -> None:
        self._sent.put(number)

    def receive(self, timeout: float) -> int | None:
        try:
            return self._sent.get(timeout=timeout)
        except queue.Empty:
            return None
