"""Phase 2, balance and allgatherv (Section 3.1.2): every rank gets the global top-k.

Positions count the owners in the order of their regions, so that blocks joined by position ascend.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..vectors.sparse import Indices, SparseVector, concatenate
from ..vectors.wire import WireCodec

if TYPE_CHECKING:
    from ..transport.base import Transport


@dataclass(frozen=True)
class BalancePlan:
    """Who holds what before and after balancing: offsets into the global top-k, by position, shape (P + 1,)."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]

    @property
    def moves(self) -> NDArray[np.int64]:
        """int64, shape (P, P): elements that go from position i to position j (the diagonal: that stay)."""
        start = np.maximum(self.before[:-1, None], self.after[None, :-1])
        stop = np.minimum(self.before[1:, None], self.after[None, 1:])
        overlap: NDArray[np.int64] = np.maximum(stop - start, 0)
        return overlap

    def ranges(self, boundaries: Indices) -> tuple[Indices, Indices]:
        """From where to where the regions go that each position's share comes from: int64, shape (P,) each."""
        first = np.searchsorted(self.before, self.after[:-1], side="right") - 1
        last = np.searchsorted(self.before, self.after[1:], side="left")
        return boundaries[first.clip(0, len(first) - 1)], boundaries[np.maximum(last, first + 1).clip(0, len(first))]


def plan_balance(sizes: NDArray[np.int64]) -> BalancePlan:
    """Equal shares of the global top-k. sizes: int64, shape (P,): what each position holds."""
    before = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    after = before[-1] * np.arange(len(sizes) + 1) // len(sizes)
    return BalancePlan(before, after)


def ring_elements(sizes: NDArray[np.int64], region_order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Elements that each position sends in an allgatherv: all, but the block of the rank after it."""
    by_rank = np.empty_like(sizes)
    by_rank[region_order] = sizes
    sent: NDArray[np.int64] = sizes.sum() - by_rank[(region_order + 1) % len(sizes)]
    return sent


def needs_balance(sizes: NDArray[np.int64], trigger: float) -> bool:
    """The paper's rule: the largest block exceeds `trigger` times the mean."""
    return len(sizes) > 1 and bool(sizes.max() > trigger * sizes.mean())


def balance(chosen: SparseVector, plan: BalancePlan, boundaries: Indices, region_order: NDArray[np.int64],
            messages_in_flight: int, codec: WireCodec, transport: Transport) -> SparseVector:
    """Moves this rank's elements to where the plan wants them, and returns its share."""
    position = int(np.flatnonzero(region_order == transport.rank)[0])
    moves, ends = plan.moves, boundaries.tolist()
    cuts = np.concatenate([[0], np.cumsum(moves[position])])
    parts = [chosen[start:stop] for start, stop in itertools.pairwise(cuts)]
    outgoing = {int(region_order[to]): codec.encode(part, ends[position], ends[position + 1])
                for to, part in enumerate(parts) if to != position and len(part)}
    arriving = {int(region_order[source]): (int(moves[source, position]), ends[source], ends[source + 1])
                for source in range(len(moves)) if source != position and moves[source, position]}
    incoming = {rank: codec.size(count, stop - start) for rank, (count, start, stop) in arriving.items()}
    shares = {int(transport.rank): parts[position]}
    for batch in transport.exchange(outgoing, incoming, messages_in_flight):
        shares.update((source, codec.decode(message, *arriving[source])) for source, message in batch)
    return concatenate([shares[rank] for rank in region_order.tolist() if rank in shares], codec.dtype)


def allgatherv(share: SparseVector, sizes: NDArray[np.int64], ranges: tuple[Indices, Indices],
               region_order: NDArray[np.int64], codec: WireCodec, transport: Transport) -> SparseVector:
    """The global top-k, from every rank's share. sizes: elements by position; ranges: where they lie, by position."""
    starts, stops = ranges
    lengths = np.empty_like(sizes)
    lengths[region_order] = codec.sizes(sizes, stops - starts)
    position = int(np.flatnonzero(region_order == transport.rank)[0])
    messages = transport.allgatherv(codec.encode(share, int(starts[position]), int(stops[position])), lengths)
    return concatenate([codec.decode(messages[rank], *where) for rank, *where in
                        zip(region_order.tolist(), sizes.tolist(), starts.tolist(), stops.tolist(), strict=True)],
                       codec.dtype)
