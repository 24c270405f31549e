"""Balance and allgatherv (Section 3.1.2): blocks of the global top-k are made equal, and gathered."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..transport.base import Counts
from ..vectors.sparse import Indices, SparseVector, concatenate
from ..vectors.wire import Extent
from .link import Link, Route
from .regions import Regions


def balance_and_allgatherv(kept: SparseVector, sizes: Counts, balances: bool, regions: Regions, link: Link,
                           ) -> SparseVector:
    """Return the elements that all ranks keep. Collective.

    The sizes, int64 of shape (P,), count the kept elements, by region. `balances` makes the blocks equal before.
    """
    transport, extents = link.transport, regions.extents(sizes)
    if balances:
        plan = BalancePlan(sizes)
        with transport.phase("balance"):
            kept = concatenate(link.send_and_receive(kept, *plan.routes(regions, transport.rank)), link.codec.dtype)
        extents = plan.extents(regions.boundaries)
    with transport.phase("allgatherv"):
        blocks = link.allgatherv(kept, list(zip(regions.order.tolist(), extents, strict=True)))
        return concatenate(blocks, link.codec.dtype)


class BalancePlan:
    """A plan of equal blocks of the global top-k.

    The sizes, int64 of shape (P,), count each position's elements. Positions count the owners in the order of their
    regions, so that blocks joined by position ascend. `before` and `after` are blocks' offsets then, shape (P + 1,).
    """

    def __init__(self, sizes: Counts) -> None:
        self.before: Counts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.after: Counts = self.before[-1] * np.arange(len(sizes) + 1) // len(sizes)

    def moved(self, source: Any, target: Any) -> Counts:
        """Return the number of elements that move from source to target; if they are the same, that stay.

        Arrays: one element for each pair.
        """
        start = np.maximum(self.before[source], self.after[target])
        stop = np.minimum(self.before[source + 1], self.after[target + 1])
        elements: Counts = np.maximum(stop - start, 0)
        return elements

    def extents(self, boundaries: Indices) -> list[Extent]:
        """Return the extent of every position's block after balancing, within the regions that it comes from."""
        first = np.searchsorted(self.before, self.after[:-1], side="right") - 1
        last = np.searchsorted(self.before, self.after[1:], side="left")
        starts = boundaries[first.clip(0, len(first) - 1)]
        stops = boundaries[np.maximum(last, first + 1).clip(0, len(first))]
        blocks = np.diff(self.after)
        return [Extent(*each) for each in zip(blocks.tolist(), starts.tolist(), stops.tolist(), strict=True)]

    def routes(self, regions: Regions, rank: int) -> tuple[Route, Route]:
        """Return the messages that a rank sends, and those that it receives, both ordered by position."""
        mine, positions, owners = regions.of(rank), np.arange(len(regions.sent)), regions.order.tolist()
        sent = list(zip(owners, regions.extents_within(mine, self.moved(mine, positions)), strict=True))
        received = list(zip(owners, regions.extents(self.moved(positions, mine)), strict=True))
        return sent, received


def needs_balance(sizes: Counts, trigger: float) -> bool:
    """Return True if the largest block exceeds `trigger` times the mean, by the paper's rule."""
    return len(sizes) > 1 and bool(sizes.max() > trigger * sizes.mean())
