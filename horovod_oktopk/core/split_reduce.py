"""Phase 1, split and reduce (Section 3.1.1): every region's elements go to its owner, who sums them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from . import wire
from .sparse import Indices, SparseVector, sum_of

if TYPE_CHECKING:
    from ..transport.base import Transport


def split_and_reduce(selection: SparseVector, boundaries: Indices, counts: NDArray[np.int64], rotation: int,
                     bucket_size: int, transport: Transport) -> SparseVector:
    """The sum, over all ranks, of what they selected in this rank's region.

    selection: this rank's local top-k. boundaries: int64, shape (P + 1,).
    counts: int64, shape (P, P): elements of rank i in region j. Rank (j + rotation) mod P owns region j.
    """
    rank, size = transport.rank, transport.size
    dtype = selection.values.dtype
    region = (rank - rotation) % size
    start, stop = int(boundaries[region]), int(boundaries[region + 1])
    parts = selection.split(boundaries)
    outgoing = {(j + rotation) % size: wire.encode(part) for j, part in enumerate(parts) if j != region and len(part)}
    incoming = {source: int(count) * wire.element_bytes(dtype)
                for source, count in enumerate(counts[:, region]) if source != rank and count}
    received = {rank: parts[region]}
    for bucket in transport.exchange(outgoing, incoming, bucket_size):
        received.update((source, wire.decode(message, dtype, start, stop)) for source, message in bucket)
    return sum_of([received[source] for source in sorted(received)])
