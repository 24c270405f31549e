"""The phases that move elements: split and reduce, balance, allgatherv (Section 3.1); and their volume (Equation 3).

Messages are encoded and decoded in SparseTransport alone: a phase has vectors and plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Counts, Transport, allgather_rows
from ..vectors.sparse import Indices, SparseVector, concatenate, sum_of
from ..vectors.wire import Extent, WireCodec
from .regions import Regions, count_by_region, owner_rotation

Bound = float | NDArray[np.float64]
"""Words that a rank may send, see `oktopk_bound`; or that each rank may."""
Route = Sequence[tuple[int, Extent]]
"""The (rank, extent) of messages to, or from, the ranks, this rank among them; in the order of their elements."""


@dataclass(frozen=True)
class SparseTransport:
    """A Transport of sparse vectors."""

    transport: Transport
    codec: WireCodec

    def exchange(self, vector: SparseVector, sent: Route, received: Route) -> list[SparseVector]:
        """Send every rank its part of a vector; return the parts for this one, in the order of `received`.

        sent: extents of consecutive parts of the vector. Empty parts do not travel, and this rank's own part is not
        encoded.
        """
        own, ends = self.transport.rank, np.cumsum([0, *(extent.length for _, extent in sent)]).tolist()
        parts = {rank: vector[start:stop] for (rank, _), (start, stop)
                 in zip(sent, itertools.pairwise(ends), strict=True)}
        outgoing = {rank: self.codec.encode(parts[rank], extent.start, extent.stop)
                    for rank, extent in sent if rank != own and extent.length}
        extents = {rank: extent for rank, extent in received if rank != own and extent.length}
        incoming = {rank: self.codec.size(extent.length, extent.span) for rank, extent in extents.items()}
        arrived = {own: parts[own]}
        for batch in self.transport.exchange(outgoing, incoming):
            arrived.update((rank, self.codec.decode(message, *extents[rank])) for rank, message in batch)
        nothing = SparseVector.empty(self.codec.dtype)
        return [arrived.get(rank, nothing) for rank, _ in received]

    def allgatherv(self, vector: SparseVector, received: Route) -> list[SparseVector]:
        """Return all ranks' vectors, in the order of `received`, which holds every rank."""
        extents = dict(received)
        sizes = np.array([self.codec.size(extents[rank].length, extents[rank].span) for rank in range(len(extents))])
        mine = extents[self.transport.rank]
        messages = self.transport.allgatherv(self.codec.encode(vector, mine.start, mine.stop), sizes)
        return [self.codec.decode(messages[rank], *extent) for rank, extent in received]


def split_and_reduce(selection: SparseVector, regions: Regions, sparse: SparseTransport) -> SparseVector:
    """Return the sum of all ranks' selections (the local top-k) in this rank's region. Collective."""
    return sum_of(sparse.exchange(selection, *plan_split(regions, sparse.transport.rank)))


def plan_split(regions: Regions, rank: int) -> tuple[Route, Route]:
    """Return the messages that a rank sends, ordered by region, and those that it receives, ordered by rank."""
    mine = regions.of(rank)
    sent = list(zip(regions.order.tolist(), regions.extents(regions.sent), strict=True))
    received = [(rank, regions.extent(mine, count)) for rank, count in enumerate(regions.received.tolist())]
    return sent, received


class BalancePlan:
    """A plan of equal shares of the global top-k.

    sizes: int64, shape (P,): each position's number of elements. Positions count the owners in the order of their
    regions, so that blocks joined by position ascend. before, after: offsets of the shares then: shape (P + 1,).
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
        """Return the extent of every position's share after balancing, within the regions that it comes from."""
        first = np.searchsorted(self.before, self.after[:-1], side="right") - 1
        last = np.searchsorted(self.before, self.after[1:], side="left")
        starts = boundaries[first.clip(0, len(first) - 1)]
        stops = boundaries[np.maximum(last, first + 1).clip(0, len(first))]
        shares = np.diff(self.after)
        return [Extent(*each) for each in zip(shares.tolist(), starts.tolist(), stops.tolist(), strict=True)]

    def routes(self, regions: Regions, rank: int) -> tuple[Route, Route]:
        """Return the messages that a rank sends, and those that it receives, both ordered by position."""
        mine, positions, owners = regions.of(rank), np.arange(len(regions.sent)), regions.order.tolist()
        sent = [(owner, regions.extent(mine, count))
                for owner, count in zip(owners, self.moved(mine, positions).tolist(), strict=True)]
        received = list(zip(owners, regions.extents(self.moved(positions, mine)), strict=True))
        return sent, received


def needs_balance(sizes: Counts, trigger: float) -> bool:
    """Return True if the largest block exceeds `trigger` times the mean, by the paper's rule."""
    return len(sizes) > 1 and bool(sizes.max() > trigger * sizes.mean())


@dataclass(frozen=True, kw_only=True)
class Division(Regions):
    """Regions with the load of their owners, and what keeps to the bound beside it.

    load_sent, load_received: int64, shape (P,): elements that every rank sends to others, and receives, in phase 1.
    All ranks that take part in the exchange know all the numbers, so they decide alike.
    """

    load_sent: Counts
    load_received: Counts

    def fits_regions(self, k: float, bound: float) -> bool:
        """Return True if each owner receives few enough elements to keep to the bound, together with all of u."""
        return bool((self.load_received <= np.maximum(bound / 2 - k, k) + len(self.sent)).all())

    def fits(self, shares: Counts, bound: Bound, moved: Counts | int = 0) -> bool:
        """Return True if an allgatherv of these shares keeps to the bound, after `moved` elements to balance them.

        All are by rank. In an allgatherv each rank sends all, except the share of the rank after it.
        """
        gathered = shares.sum() - np.roll(shares, -1)
        return bool((2 * (self.load_sent + moved + gathered) <= bound).all())

    def fits_balanced(self, sizes: Counts, bound: Bound) -> bool:
        """Return True if balancing and allgatherv keep to the bound. sizes: elements by region."""
        plan, positions = BalancePlan(sizes), np.arange(len(sizes))
        moved, shares = sizes - plan.moved(positions, positions), np.diff(plan.after)
        region = np.argsort(self.order)  # of each rank
        return self.fits(shares[region], bound, moved[region])


def divide(boundaries: Indices, indices: Indices, counts: Counts, transport: Transport, rotates: bool = True,
           ) -> Division:
    """Return the regions of a step, with their load.

    indices: this rank's selection, ascending. counts: the result of `agreement.tell` for all ranks' counts by region.
    If these are all counts, the owners are those who keep most elements on their rank (if `rotates`). Otherwise rank
    j owns region j, and the load is gathered: two words of each rank.
    """
    rank, mine = transport.rank, count_by_region(indices, boundaries)
    if counts.shape[1] == transport.size:
        rotation, ranks = owner_rotation(counts) if rotates else 0, np.arange(transport.size)
        owned = (ranks - rotation) % transport.size
        kept = counts[ranks, owned]
        return Division(boundaries, mine, counts[:, owned[rank]], rotation, load_sent=counts.sum(axis=1) - kept,
                        load_received=counts.sum(axis=0)[owned] - kept)
    received = counts[:, 0]
    moved = np.array([mine.sum() - mine[rank], received.sum() - received[rank]]).astype(np.uint32)
    sent, arrived = allgather_rows(moved, transport).astype(np.int64).T
    return Division(boundaries, mine, received, load_sent=sent, load_received=arrived)


def dense_volume(n: int, size: int) -> float:
    """Return 2n(P-1)/P words, for Rabenseifner's allreduce."""
    return 2 * n * (size - 1) / size


def oktopk_bound(k: float, size: int, global_k: float | None = None) -> float:
    """Return Equation 3, for Ok-Topk: 2k(P-1)/P words in phase 1 and 4k'(P-1)/P in phase 2, at most.

    global_k: k', elements of the sum that are kept; None: k, which makes it 6k(P-1)/P. With fewer than k, the mean
    rank keeps to this. A rank that owns nothing of its own selection may need 2(k + k') words.
    """
    kept = k if global_k is None else global_k
    bound = 2 * (k + 2 * kept) * (size - 1) / size
    return bound if kept >= k else max(bound, 2 * (k + kept))


def whole_update(update: SparseVector, bounds: Counts, within: Transport) -> SparseVector:
    """Return the update of all shares. Collective on the host.

    bounds: of the shares; a rank's update has indices within its own.
    """
    dtype = update.values.dtype
    offset = np.dtype(np.uint32)  # vectors are shorter than 2**32
    mine = np.concatenate([update.values.view(np.uint8), update.indices.astype(offset).view(np.uint8)])
    lengths = within.allgather(np.array([mine.nbytes]))[:, 0]
    parts = []
    for start, message in zip(bounds[:-1], within.allgatherv(mine, lengths), strict=True):
        part = message.copy()  # aligned
        length = len(part) // (dtype.itemsize + offset.itemsize) * dtype.itemsize
        parts.append(SparseVector(part[length:].view(offset).astype(np.int64) + start, part[:length].view(dtype)))
    return concatenate(parts, dtype)
