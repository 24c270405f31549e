"""The collectives of a library as a Transport; those of one rank."""

from __future__ import annotations

import queue
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import WORD, Bytes, Counts, Signals, Transport, Values


class CollectivesTransport(Transport):
    """A Transport of a library's blocking collectives, from contiguous NumPy to NumPy. Messages are words of 4 bytes.

    A subclass has the library's allgather and alltoall below, and `allreduce`.
    """

    @abstractmethod
    def _allgather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return all ranks' values, shape (sum of their lengths,); lengths may differ."""

    @abstractmethod
    def _alltoall(self, values: NDArray[Any], splits: NDArray[np.int32]) -> NDArray[Any]:
        """Send values to every rank; return the values for this rank.

        The values for rank 0 come first, then those for rank 1, and so on; `splits` has the number for each rank.
        """

    def allgather(self, row: Counts) -> Counts:
        return self._allgather(np.ascontiguousarray(row)).reshape(self.size, len(row))

    def alltoall(self, rows: Counts) -> Counts:
        return self._alltoall(rows.ravel(), np.full(self.size, rows.shape[1], np.int32)).reshape(rows.shape)

    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        """Exchange all messages in one batch; their lengths must be multiples of 4 bytes."""
        splits = np.array([len(outgoing.get(to, ())) // WORD for to in range(self.size)], np.int32)
        joined = np.concatenate([np.empty(0, np.uint8), *(outgoing[to] for to in sorted(outgoing))])
        received = self._alltoall(joined.view(np.int32), splits).view(np.uint8)
        sources = sorted(incoming)
        cuts = np.cumsum([incoming[source] for source in sources])[:-1]
        yield list(zip(sources, np.split(received, cuts), strict=True)) if sources else []

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        """Gather the messages, padded to multiples of 4 bytes; those of sparse vectors need no padding."""
        padded = np.pad(message, (0, -len(message) % WORD))
        gathered = self._allgather(padded.view(np.int32)).view(np.uint8)
        parts = np.split(gathered, np.cumsum(sizes + -sizes % WORD)[:-1])
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


class AloneTransport(CollectivesTransport):
    """The transport of a single rank. It checks nothing: a rank that is alone sends to nobody."""

    rank, size, concurrent = 0, 1, True

    def signals(self) -> AloneSignals:
        return AloneSignals()

    def _allgather(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.copy()

    def allreduce(self, values: Values) -> Values:
        return values.copy()

    def _alltoall(self, values: NDArray[Any], splits: NDArray[np.int32]) -> NDArray[Any]:  # noqa: ARG002
        return values.copy()


class AloneSignals(Signals):
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
