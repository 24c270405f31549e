"""Split and reduce (Section 3.1.1): every rank gets the sum of all selections in its region."""

from __future__ import annotations

from ..vectors.sparse import SparseVector, sum_of
from .link import Link
from .regions import Regions


def split_and_reduce(selection: SparseVector, regions: Regions, link: Link) -> SparseVector:
    """Return the sum of all ranks' selections (the local top-k) in this rank's region. Collective."""
    with link.transport.phase("split_and_reduce"):
        return sum_of(link.send_and_receive(selection, *regions.routes(link.transport.rank)))
