"""Phase 2, balance and allgatherv (Section 3.1.2): every rank gets the global top-k.

Positions count the owners in the order of their regions, so that blocks joined by position ascend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..vectors.sparse import Indices, SparseVector, concatenate
from ..vectors.wire import Extent
from .regions import Regions
from .sparse_transport import Route, SparseTransport


@dataclass(frozen=True)
class BalancePlan:
    """Offsets into the global top-k of each position's share before and after balancing: shape (P + 1,)."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]

    def moved(self, source: Any, target: Any) -> NDArray[np.int64]:
        """Return the number of elements that move from source to target; if they are the same, that stay.

        Arrays: one element for each pair.
        """
        start = np.maximum(self.before[source], self.after[target])
        stop = np.minimum(self.before[source + 1], self.after[target + 1])
        elements: NDArray[np.int64] = np.maximum(stop - start, 0)
        return elements

    def ranges(self, boundaries: Indices) -> tuple[Indices, Indices]:
        """Return the start and stop of the regions that each position's share comes from: int64, shape (P,) each."""
        first = np.searchsorted(self.before, self.after[:-1], side="right") - 1
        last = np.searchsorted(self.before, self.after[1:], side="left")
        return boundaries[first.clip(0, len(first) - 1)], boundaries[np.maximum(last, first + 1).clip(0, len(first))]

    def extents(self, boundaries: Indices) -> list[Extent]:
        """Return the extent of every position's share after balancing."""
        starts, stops = self.ranges(boundaries)
        shares = np.diff(self.after)
        return [Extent(*each) for each in zip(shares.tolist(), starts.tolist(), stops.tolist(), strict=True)]

    def routes(self, regions: Regions, rank: int) -> tuple[Route, Route]:
        """Return the messages that a rank sends, and those that it receives, both ordered by position."""
        mine, positions = regions.of(rank), np.arange(len(regions.sent))
        sent = [(owner, regions.extent(mine, count))
                for owner, count in zip(regions.owners, self.moved(mine, positions).tolist(), strict=True)]
        received = list(zip(regions.owners, regions.extents(self.moved(positions, mine)), strict=True))
        return sent, received


def plan_balance(sizes: NDArray[np.int64]) -> BalancePlan:
    """Plan equal shares of the global top-k. sizes: int64, shape (P,): each position's number of elements."""
    before = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    after = before[-1] * np.arange(len(sizes) + 1) // len(sizes)
    return BalancePlan(before, after)


def ring_elements(sizes: NDArray[np.int64], region_order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the elements that each position sends in an allgatherv: all, except the block of the rank after it."""
    by_rank = np.empty_like(sizes)
    by_rank[region_order] = sizes
    sent: NDArray[np.int64] = sizes.sum() - by_rank[(region_order + 1) % len(sizes)]
    return sent


def needs_balance(sizes: NDArray[np.int64], trigger: float) -> bool:
    """Return True if the largest block exceeds `trigger` times the mean, by the paper's rule."""
    return len(sizes) > 1 and bool(sizes.max() > trigger * sizes.mean())


def balance(chosen: SparseVector, plan: BalancePlan, regions: Regions, sparse: SparseTransport) -> SparseVector:
    """Move this rank's elements to the ranks of the plan, and return this rank's share. Collective."""
    shares = sparse.exchange(chosen, *plan.routes(regions, sparse.rank))
    return concatenate(shares, sparse.codec.dtype)


def allgatherv(share: SparseVector, extents: Sequence[Extent], regions: Regions, sparse: SparseTransport,
               ) -> SparseVector:
    """Return the global top-k, from every rank's share. Collective. extents: of the shares, by position."""
    shares = sparse.allgatherv(share, list(zip(regions.owners, extents, strict=True)))
    return concatenate(shares, sparse.codec.dtype)
