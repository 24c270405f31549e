"""Regions: the division of the index space among the ranks (Section 3.1.1, Figure 1), their owners, and phase 1.

A deviation from the paper, for the promised volume; `docs/algorithm.md` says why: owners follow from the
rotation that keeps most elements on their rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..transport.base import Counts, Transport, allgather_rows
from ..vectors.sparse import Indices, SparseVector, sum_of
from ..vectors.wire import Extent
from .sparse_transport import Route, SparseTransport


@dataclass(frozen=True)
class Regions:
    """The regions of one step, their owners, and what this rank sends and receives there.

    boundaries: int64, shape (P + 1,): offsets from 0 to n; equal on all ranks.
    sent: int64, shape (P,): this rank's elements by region. received: every rank's in this rank's region.
    rotation: rank (j + rotation) mod P owns region j.
    """

    boundaries: Indices
    sent: Counts
    received: Counts
    rotation: int = 0

    @property
    def order(self) -> Counts:
        """The owners in the order of their regions: int64, shape (P,)."""
        return (np.arange(len(self.sent)) + self.rotation) % len(self.sent)

    @property
    def owners(self) -> list[int]:
        """The owners in the order of their regions, as plain numbers."""
        return self.order.tolist()  # type: ignore[no-any-return]

    def of(self, rank: int) -> int:
        """Return the region that a rank owns."""
        return (rank - self.rotation) % len(self.sent)

    def extent(self, region: int, count: int) -> Extent:
        """Return the extent of a message with `count` elements of a region."""
        return Extent(count, int(self.boundaries[region]), int(self.boundaries[region + 1]))

    def extents(self, sizes: Counts) -> list[Extent]:
        """Return the extent of one message for each region. sizes: the number of elements, by region."""
        return [self.extent(region, count) for region, count in enumerate(sizes.tolist())]


@dataclass(frozen=True)
class Load:
    """Elements that every rank sends to others, and receives, in phase 1: int64, shape (P,); all ranks know it."""

    sent: Counts
    received: Counts


def divide(boundaries: Indices, indices: Indices, counts: Counts, transport: Transport, rotates: bool = True,
           ) -> tuple[Regions, Load]:
    """Return the regions of a step, and the load of their owners.

    indices: this rank's selection, ascending. counts: the result of `agreement.tell` for all ranks' counts by region.
    If these are all counts, the owners are those who keep most elements on their rank (if `rotates`). Otherwise rank
    j owns region j, and the load is gathered: two words of each rank.
    """
    rank, mine = transport.rank, count_by_region(indices, boundaries)
    if counts.shape[1] == transport.size:
        regions = Regions(boundaries, mine, counts[:, 0], owner_rotation(counts) if rotates else 0)
        ranks = np.arange(transport.size)
        owned = (ranks - regions.rotation) % transport.size
        kept = counts[ranks, owned]
        load = Load(counts.sum(axis=1) - kept, counts.sum(axis=0)[owned] - kept)
        return replace(regions, received=counts[:, owned[rank]]), load
    received = counts[:, 0]
    moved = np.array([mine.sum() - mine[rank], received.sum() - received[rank]]).astype(np.uint32)
    return Regions(boundaries, mine, received), Load(*allgather_rows(moved, transport).astype(np.int64).T)


def count_by_region(indices: Indices, boundaries: Indices) -> Counts:
    """Count the ascending indices in each region: int64, shape (P,)."""
    return np.diff(np.searchsorted(indices, boundaries))


def owner_rotation(counts: Counts) -> int:
    """Return the r for which rank (j + r) mod P owning region j keeps most elements at home; the least on a tie.

    counts: int64, shape (P, P): elements of rank i in region j. Some rotation keeps at least 1/P of
    all, so ranks send 2k(P-1)/P words on average, which the paper takes for granted.
    """
    size = len(counts)
    ranks = np.arange(size)
    kept = [int(counts[ranks, (ranks - rotation) % size].sum()) for rotation in range(size)]
    return int(np.argmax(kept))


def split_and_reduce(selection: SparseVector, regions: Regions, sparse: SparseTransport) -> SparseVector:
    """Return the sum over all ranks of their selections in this rank's region. Collective.

    selection: this rank's local top-k.
    """
    return sum_of(sparse.exchange(selection, *plan_split(regions, sparse.rank)))


def plan_split(regions: Regions, rank: int) -> tuple[Route, Route]:
    """Return the messages that a rank sends, ordered by region, and those that it receives, ordered by rank."""
    mine = regions.of(rank)
    sent = list(zip(regions.owners, regions.extents(regions.sent), strict=True))
    received = [(rank, regions.extent(mine, count)) for rank, count in enumerate(regions.received.tolist())]
    return sent, received
