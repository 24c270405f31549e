"""Phase 1, split and reduce (Section 3.1.1): every region's elements go to its owner, who sums them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..vectors.sparse import Indices, SparseVector, sum_of
from ..vectors.wire import WireCodec

if TYPE_CHECKING:
    from ..transport.base import Transport


def split_and_reduce(selection: SparseVector, boundaries: Indices, counts: NDArray[np.int64], rotation: int,
                     messages_in_flight: int, codec: WireCodec, transport: Transport) -> SparseVector:
    """The sum, over all ranks, of what they selected in this rank's region.

    selection: this rank's local top-k. boundaries: int64, shape (P + 1,).
    counts: int64, shape (P, P): elements of rank i in region j. Rank (j + rotation) mod P owns region j.
    """
    rank, size = transport.rank, transport.size
    region = (rank - rotation) % size
    ends = boundaries.tolist()
    start, stop = ends[region], ends[region + 1]
    parts = selection.split(boundaries)
    outgoing = {(j + rotation) % size: codec.encode(part, ends[j], ends[j + 1])
                for j, part in enumerate(parts) if j != region and len(part)}
    sizes = codec.sizes(counts[:, region], np.full(size, stop - start))
    incoming = {source: int(sizes[source]) for source in range(size) if source != rank and counts[source, region]}
    received = {rank: parts[region]}
    for batch in transport.exchange(outgoing, incoming, messages_in_flight):
        received.update((source, codec.decode(message, int(counts[source, region]), start, stop))
                        for source, message in batch)
    return sum_of([received[source] for source in sorted(received)])
