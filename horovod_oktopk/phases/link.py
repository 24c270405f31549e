"""One rank's link to the others: a transport, with the format of sparse vectors on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..selection.selection import Selection
from ..transport.counting import CountingTransport
from ..vectors.sparse import SparseVector
from ..vectors.wire import Extent, WireCodec

Route = Sequence[tuple[int, Extent]]
"""The (rank, extent) of messages to, or from, the ranks, this rank among them; in the order of their elements."""


@dataclass(frozen=True)
class Link:
    """A transport of sparse vectors. Messages are encoded and decoded here alone: a phase has vectors and plans."""

    transport: CountingTransport
    codec: WireCodec

    def fitted_to(self, selection: Selection) -> tuple[Link, Selection]:
        """Return the link whose format suits a selection, and the selection with the values that arrive."""
        codec = self.codec.for_magnitudes(*selection.ends)
        return replace(self, codec=codec), replace(selection, sent=codec.round(selection.elements))

    def send_and_receive(self, vector: SparseVector, sent: Route, received: Route) -> list[SparseVector]:
        """Send every rank its part of a vector; return the parts for this one, in the order of `received`.

        `sent` holds the extents of consecutive parts of the vector. Empty parts are left out, except this rank's
        own, which is not encoded.
        """
        own, ends = self.transport.rank, np.cumsum([0, *(extent.length for _, extent in sent)]).tolist()
        parts = {rank: vector[start:stop] for (rank, _), (start, stop)
                 in zip(sent, itertools.pairwise(ends), strict=True)}
        outgoing = {rank: self.codec.encode(parts[rank], extent.start, extent.stop)
                    for rank, extent in sent if rank != own and extent.length}
        extents = {rank: extent for rank, extent in received if rank != own and extent.length}
        incoming = dict(zip(extents, self.codec.message_sizes(extents.values()), strict=True))
        arrived = {own: parts[own]}
        for batch in self.transport.send_and_receive(outgoing, incoming):
            arrived.update((rank, self.codec.decode(message, *extents[rank])) for rank, message in batch)
        return [arrived[rank] for rank, _ in received if rank in arrived]

    def allgatherv(self, vector: SparseVector, received: Route) -> list[SparseVector]:
        """Return all ranks' vectors, in the order of `received`, which holds every rank."""
        extents = dict(received)
        sizes = np.array(self.codec.message_sizes([extents[rank] for rank in range(len(extents))]))
        mine = extents[self.transport.rank]
        messages = self.transport.allgatherv(self.codec.encode(vector, mine.start, mine.stop), sizes)
        return [self.codec.decode(messages[rank], *extent) for rank, extent in received]
