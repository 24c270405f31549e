"""Split and reduce (Section 3.1.1): every rank gets the sum of all selections in its region."""

from __future__ import annotations

from ..vectors.sparse import SparseVector, sum_of
from .link import Link, Route
from .regions import Regions


def split_and_reduce(selection: SparseVector, regions: Regions, link: Link) -> SparseVector:
    """Return the sum of all ranks' selections (the local top-k) in this rank's region. Collective."""
    with link.transport.phase("split_and_reduce"):
        return sum_of(link.send_and_receive(selection, *plan_split(regions, link.transport.rank)))


def plan_split(regions: Regions, rank: int) -> tuple[Route, Route]:
    """Return the messages that a rank sends, ordered by region, and those that it receives, ordered by rank."""
    mine = regions.of(rank)
    sent = list(zip(regions.order.tolist(), regions.extents(regions.sent), strict=True))
    received = list(enumerate(regions.extents_within(mine, regions.received)))
    return sent, received
