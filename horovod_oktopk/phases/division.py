"""The division of a step: its regions with the load of their owners, and what keeps to the bound beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Counts, Transport, allgather_rows
from ..vectors.sparse import Indices
from .balance import BalancePlan
from .regions import Regions, count_by_region, owner_rotation

Words = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Division(Regions):
    """Regions with the load of their owners, and what keeps to the bound beside it.

    The loads, int64 of shape (P,), count the elements that every rank sends to others, and receives, in phase 1.
    All ranks know all the numbers, so they decide alike. `is_new` tells that the index space was cut anew.
    """

    load_sent: Counts
    load_received: Counts
    is_new: bool = False

    def fits_regions(self, k: float, bound: float) -> bool:
        """Return True if every owner receives at most max(bound/2 - k, k) + P elements in phase 1."""
        return bool((self.load_received <= np.maximum(bound / 2 - k, k) + len(self.sent)).all())

    def fits(self, sizes_by_rank: Counts, words_by_rank: Words, moved_by_rank: Counts | int = 0) -> bool:
        """Return True if an allgatherv keeps every rank to its words, after `moved` elements to balance the blocks.

        In an allgatherv each rank sends all blocks, except that of the rank after it.
        """
        gathered = sizes_by_rank.sum() - np.roll(sizes_by_rank, -1)
        return bool((2 * (self.load_sent + moved_by_rank + gathered) <= words_by_rank).all())

    def fits_balanced(self, sizes_by_region: Counts, words_by_rank: Words) -> bool:
        """Return True if balancing and allgatherv keep every rank to its words."""
        plan, positions = BalancePlan(sizes_by_region), np.arange(len(sizes_by_region))
        moved, blocks = sizes_by_region - plan.moved(positions, positions), np.diff(plan.after)
        region = np.argsort(self.order)  # of each rank
        return self.fits(blocks[region], words_by_rank, moved[region])


def divide(boundaries: Indices, indices: Indices, counts: Counts, transport: Transport, is_new: bool = False,
           ) -> Division:
    """Return the regions of a step, with their load.

    The indices, ascending, are this rank's selection; `agreement.tell` returned `counts` of all ranks' counts by
    region. If these are all counts, the owners are those who keep most elements on their rank. Otherwise rank j owns
    region j, and the load is gathered: two words of each rank.
    """
    rank = transport.rank
    if counts.shape[1] == transport.size:
        rotation, ranks = owner_rotation(counts), np.arange(transport.size)
        owned = (ranks - rotation) % transport.size
        kept = counts[ranks, owned]
        return Division(boundaries, counts[rank], counts[:, owned[rank]], rotation,
                        load_sent=counts.sum(axis=1) - kept, load_received=counts.sum(axis=0)[owned] - kept,
                        is_new=is_new)
    mine, received = count_by_region(indices, boundaries), counts[:, 0]
    moved = np.array([mine.sum() - mine[rank], received.sum() - received[rank]]).astype(np.uint32)
    sent, arrived = allgather_rows(moved, transport).astype(np.int64).T
    return Division(boundaries, mine, received, load_sent=sent, load_received=arrived, is_new=is_new)
