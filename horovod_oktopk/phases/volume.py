"""The volume that the paper promises (Equation 3), and what a step that has been planned would send."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .balance_gather import plan_balance, ring_elements
from .regions import Regions


@dataclass(frozen=True)
class Volume:
    """Words that every rank sends in this step, to be held against the bound.

    bound: in words; see `oktopk_bound`. All ranks know all the numbers, so all decide alike.
    """

    regions: Regions
    bound: float

    def fits_regions(self, k: int) -> bool:
        """Whether each owner receives so little that, with all of u, it keeps to the bound."""
        size, counts = len(self.regions.counts), self.regions.counts
        owned = (np.arange(size) - self.regions.rotation) % size
        received = counts.sum(axis=0)[owned] - counts[np.arange(size), owned]
        return bool(received.max() <= max(self.bound / 2 - k, k) + size)

    def fits_direct(self, sizes: NDArray[np.int64]) -> bool:
        """Whether an allgatherv without balancing keeps to the bound; sizes: elements by rank."""
        order = self.regions.order
        return self._fits(ring_elements(sizes[order], order))

    def fits_balanced(self, sizes: NDArray[np.int64]) -> bool:
        """Whether balancing and allgatherv keep to it; sizes: elements by region."""
        plan = plan_balance(sizes)
        moved = sizes - np.diagonal(plan.moves)
        return self._fits(moved + ring_elements(np.diff(plan.after), self.regions.order))

    def _fits(self, gathered: NDArray[np.int64]) -> bool:
        rows = self.regions.counts[self.regions.order]
        split = rows.sum(axis=1) - np.diagonal(rows)
        return bool((2 * (split + gathered)).max() <= self.bound)
