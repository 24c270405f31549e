"""A framework's collectives as a Transport: for Gloo and NCCL builds of Horovod, and for elastic jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .base import Bytes, Counts, Transport, Values

WORD = 4


class Collectives(Protocol):
    """A framework's Horovod, from contiguous NumPy to NumPy, over one process set; blocking.

    A failed call raises HorovodInternalError, which elastic training catches.
    """

    rank: int
    size: int
    concurrent: bool
    """See Transport."""

    def allgather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return all ranks' values, shape (sum of their lengths,); lengths may differ."""

    def allreduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the element-wise sum."""

    def alltoall(self, values: NDArray[Any], splits: NDArray[np.int32]) -> NDArray[Any]:
        """Send values to every rank; return the values for this rank.

        values: those for rank 0, then those for rank 1, and so on. splits: the number for each rank.
        """


class CollectivesTransport(Transport):
    """Collectives as a Transport. Messages travel as words of 4 bytes."""

    def __init__(self, collectives: Collectives) -> None:
        self.rank = collectives.rank
        self.size = collectives.size
        self.concurrent = collectives.concurrent
        self._collectives = collectives

    def allgather(self, row: Counts) -> Counts:
        rows: Counts = self._collectives.allgather(np.ascontiguousarray(row)).reshape(self.size, len(row))
        return rows

    def alltoall(self, rows: Counts) -> Counts:
        splits = np.full(self.size, rows.shape[1], np.int32)
        found: Counts = self._collectives.alltoall(rows.ravel(), splits).reshape(rows.shape)
        return found

    def allreduce(self, values: Values) -> Values:
        return self._collectives.allreduce(np.ascontiguousarray(values))

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 ) -> Iterator[list[tuple[int, Bytes]]]:
        """Exchange all messages in one batch; their lengths must be multiples of 4 bytes."""
        splits = np.array([len(outgoing.get(to, ())) // WORD for to in range(self.size)], np.int32)
        joined = np.concatenate([np.empty(0, np.uint8), *(outgoing[to] for to in sorted(outgoing))])
        received = self._collectives.alltoall(joined.view(np.int32), splits).view(np.uint8)
        sources = sorted(incoming)
        cuts = np.cumsum([incoming[source] for source in sources])[:-1]
        yield list(zip(sources, np.split(received, cuts), strict=True)) if sources else []

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        """Gather the messages, padded to multiples of 4 bytes; those of sparse vectors need no padding."""
        padded = np.zeros(-(-len(message) // WORD) * WORD, np.uint8)
        padded[:len(message)] = message
        gathered = self._collectives.allgather(padded.view(np.int32)).view(np.uint8)
        ends = np.cumsum(-(-sizes // WORD) * WORD)
        return [gathered[end - -(-size // WORD) * WORD:][:size] for end, size in zip(ends, sizes, strict=True)]
