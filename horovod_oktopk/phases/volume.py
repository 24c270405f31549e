"""The volume that the paper promises (Equation 3), and the volume of a planned step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Counts
from .balance_gather import plan_balance, ring_elements
from .regions import Load


def dense_volume(n: int, size: int) -> float:
    """Return 2n(P-1)/P words, for Rabenseifner's allreduce."""
    return 2 * n * (size - 1) / size


def oktopk_bound(k: float, size: int, global_k: float | None = None) -> float:
    """Return Equation 3, for Ok-Topk: 2k(P-1)/P words in phase 1 and 4k'(P-1)/P in phase 2, at most.

    If k' = k, these are 6k(P-1)/P words.

    global_k: k', elements of the sum that are kept; None: k. With fewer than k, the mean rank keeps to this. A rank
    that owns nothing of its own selection may need 2(k + k') words.
    """
    kept = k if global_k is None else global_k
    bound = 2 * (k + 2 * kept) * (size - 1) / size
    return bound if kept >= k else max(bound, 2 * (k + kept))


@dataclass(frozen=True)
class Volume:
    """Words that every rank sends in this step, to be compared with the bound.

    order: the owners in the order of their regions. bound: in words, see `oktopk_bound`; or that of each rank. All
    ranks that take part in the exchange know all the numbers, so they decide alike.
    """

    load: Load
    order: Counts
    bound: float | NDArray[np.float64]

    def fits_regions(self, k: float) -> bool:
        """Return True if each owner receives few enough elements to keep to the bound, together with all of u."""
        return bool((self.load.received <= np.maximum(self.bound / 2 - k, k) + len(self.order)).all())

    def fits_direct(self, sizes: Counts) -> bool:
        """Return True if an allgatherv without balancing keeps to the bound. sizes: elements by rank."""
        return self._fits(ring_elements(sizes[self.order], self.order))

    def fits_balanced(self, sizes: Counts) -> bool:
        """Return True if balancing and allgatherv keep to the bound. sizes: elements by region."""
        plan, positions = plan_balance(sizes), np.arange(len(sizes))
        moved = sizes - plan.moved(positions, positions)
        return self._fits(moved + ring_elements(np.diff(plan.after), self.order))

    def _fits(self, gathered: Counts) -> bool:
        by_rank = np.empty_like(gathered)
        by_rank[self.order] = gathered
        return bool((2 * (self.load.sent + by_rank) <= self.bound).all())
