"""One rank's link to the others: a transport, with the format of sparse vectors on it."""

from __future__ import annotations

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
        own, pieces = self.transport.rank, vector.split([extent.length for _, extent in sent])
        parts = {rank: part for (rank, _), part in zip(sent, pieces, strict=True)}
        outgoing = self.codec.encode_each(parts, self._messages(sent))
        extents = self._messages(received)
        incoming = dict(zip(extents, self.codec.message_sizes(extents.values()), strict=True))
        arrived = {own: parts[own]}
        for batch in self.transport.send_and_receive(outgoing, incoming):
            arrived.update(self.codec.decode_each(batch, extents))
        return [arrived[rank] for rank, _ in received if rank in arrived]

    def allgatherv(self, vector: SparseVector, received: Route) -> list[SparseVector]:
        """Return all ranks' vectors, in the order of `received`, which holds every rank."""
        extents = dict(received)
        sizes = np.array(self.codec.message_sizes([extents[rank] for rank in range(len(extents))]))
        mine = extents[self.transport.rank]
        messages = self.transport.allgatherv(self.codec.encode(vector, mine.start, mine.stop), sizes)
        vectors = self.codec.decode_each(enumerate(messages), extents)
        return [vectors[rank] for rank in extents]

    def _messages(self, route: Route) -> dict[int, Extent]:
        """Return the extents of a route's messages, which are to or from other ranks, and not empty."""
        return {rank: extent for rank, extent in route if rank != self.transport.rank and extent.length}
