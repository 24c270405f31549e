"""Sparse vectors between ranks. Messages are encoded and decoded here: a phase has vectors and plans alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..transport.base import Transport
from ..vectors.sparse import SparseVector
from ..vectors.wire import Extent, WireCodec

Route = Sequence[tuple[int, Extent]]
"""The (rank, extent) of messages to, or from, the ranks, this rank among them; in the order of their elements."""


@dataclass(frozen=True)
class SparseTransport:
    """A Transport of sparse vectors."""

    transport: Transport
    codec: WireCodec

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def spanning(self, lowest: float, largest: float) -> SparseTransport:
        """Return the same transport for magnitudes in [lowest, largest]; see WireCodec.spanning."""
        return replace(self, codec=self.codec.spanning(lowest, largest))

    def exchange(self, vector: SparseVector, sent: Route, received: Route) -> list[SparseVector]:
        """Send every rank its part of a vector; return the parts for this one, in the order of `received`.

        sent: extents of consecutive parts of the vector. Empty parts do not travel, and this rank's own part is not
        encoded.
        """
        ends = np.cumsum([0, *(extent.length for _, extent in sent)]).tolist()
        parts = {rank: vector[start:stop] for (rank, _), (start, stop)
                 in zip(sent, itertools.pairwise(ends), strict=True)}
        outgoing = {rank: self.codec.encode(parts[rank], extent.start, extent.stop)
                    for rank, extent in sent if rank != self.rank and extent.length}
        extents = {rank: extent for rank, extent in received if rank != self.rank and extent.length}
        incoming = {rank: self.codec.size(extent.length, extent.span) for rank, extent in extents.items()}
        arrived = {self.rank: parts[self.rank]}
        for batch in self.transport.exchange(outgoing, incoming):
            arrived.update((rank, self.codec.decode(message, *extents[rank])) for rank, message in batch)
        nothing = SparseVector.empty(self.codec.dtype)
        return [arrived.get(rank, nothing) for rank, _ in received]

    def allgatherv(self, vector: SparseVector, received: Route) -> list[SparseVector]:
        """Return all ranks' vectors, in the order of `received`, which holds every rank."""
        extents = dict(received)
        sizes = np.array([self.codec.size(extents[rank].length, extents[rank].span) for rank in range(self.size)])
        mine = extents[self.rank]
        messages = self.transport.allgatherv(self.codec.encode(vector, mine.start, mine.stop), sizes)
        return [self.codec.decode(messages[rank], *extent) for rank, extent in received]
