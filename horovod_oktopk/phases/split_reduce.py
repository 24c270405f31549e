"""Phase 1, split and reduce (Section 3.1.1): every region's elements go to its owner, which sums them."""

from __future__ import annotations

from ..vectors.sparse import SparseVector, sum_of
from .regions import Regions
from .sparse_transport import Route, SparseTransport


def split_and_reduce(selection: SparseVector, regions: Regions, ranks: SparseTransport) -> SparseVector:
    """Return the sum over all ranks of their selections in this rank's region. Collective.

    selection: this rank's local top-k.
    """
    return sum_of(ranks.exchange(selection, *plan_split(regions, ranks.rank)))


def plan_split(regions: Regions, rank: int) -> tuple[Route, Route]:
    """Return the messages that a rank sends, ordered by region, and those that it receives, ordered by rank."""
    mine = regions.of(rank)
    sent = list(zip(regions.owners, regions.extents(regions.sent), strict=True))
    received = [(rank, regions.extent(mine, count)) for rank, count in enumerate(regions.received.tolist())]
    return sent, received
