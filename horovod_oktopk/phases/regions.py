"""Regions: the division of the index space among the ranks (Section 3.1.1, Figure 1), their owners, and repartition.

Two deviations from the paper, for the promised volume; `docs/algorithm.md` says why. Owners follow from the rotation
that keeps most elements on their rank. The ranks average their *distributions* of top-k elements and cut that,
instead of averaging their cuts; a rank tells O(P) words.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Counts, Transport, allgather_rows
from ..vectors.sparse import Indices
from ..vectors.wire import Extent
from .link import Route

SAMPLES = 64
"""Quantiles that each rank contributes to a cut."""
SLACK = 1 / 32
"""Largest distance of a cut from its place, as a fraction of a region's mean weight; or one element for each rank,
if that is more, as all ranks may hold the same index.
"""
TRUSTED = 4
"""Rounds in which cuts are corrected by the samples; after them intervals are halved."""


@dataclass(frozen=True)
class Regions:
    """The regions of one step, their owners, and what this rank sends and receives there.

    The boundaries, int64 of shape (P + 1,), are offsets from 0 to n, equal on all ranks. `sent`, int64 of shape (P,),
    counts this rank's elements by region, and `received` every rank's in this rank's region.
    Rank (j + rotation) mod P owns region j.
    """

    boundaries: Indices
    sent: Counts
    received: Counts
    rotation: int = 0

    @cached_property
    def order(self) -> Counts:
        """The owners in the order of their regions: int64, shape (P,)."""
        return (np.arange(len(self.sent)) + self.rotation) % len(self.sent)

    def of(self, rank: int) -> int:
        """Return the region that a rank owns."""
        return (rank - self.rotation) % len(self.sent)

    def extents(self, sizes: Counts) -> list[Extent]:
        """Return the extent of one message for each region, from the number of its elements."""
        ranges = itertools.pairwise(self.boundaries.tolist())
        return [Extent(count, *each) for count, each in zip(sizes.tolist(), ranges, strict=True)]

    def extents_within(self, region: int, sizes: Counts) -> list[Extent]:
        """Return the extent of each message, from the number of its elements, if all lie in one region."""
        start, stop = self.boundaries[region:region + 2].tolist()
        return [Extent(count, start, stop) for count in sizes.tolist()]

    def routes(self, rank: int) -> tuple[Route, Route]:
        """Return the messages that a rank sends, ordered by region, and those that it receives, ordered by rank."""
        received = enumerate(self.extents_within(self.of(rank), self.received))
        return list(zip(self.order.tolist(), self.extents(self.sent), strict=True)), list(received)


def count_by_region(indices: Indices, boundaries: Indices) -> Counts:
    """Count the ascending indices in each region: int64, shape (P,)."""
    return np.diff(np.searchsorted(indices, boundaries))


def owner_rotation(counts: Counts) -> int:
    """Return the r for which rank (j + r) mod P owning region j keeps most elements at home; the least on a tie.

    The counts, int64 of shape (P, P), are of rank i's elements in region j. Some rotation keeps at least 1/P of
    all, so ranks send 2k(P-1)/P words on average, which the paper takes for granted.
    """
    size = len(counts)
    ranks = np.arange(size)
    kept = [int(counts[ranks, (ranks - rotation) % size].sum()) for rotation in range(size)]
    return int(np.argmax(kept))


def space_repartition(indices: Indices, n: int, transport: Transport) -> Indices:
    """Return boundaries that balance all ranks' local top-k. Collective.

    No region is more than a sixteenth, or 2P, above the mean. The indices, int64, ascend: this rank's local top-k.
    Return int64, shape (P + 1,): offsets from 0 to n, the same on every rank. A rank tells 65 words, and then 2P in
    each round of counting: one round, if the samples suffice.
    """
    samples = local_quantiles(indices, transport.rank, transport.size)
    found = Distribution(allgather_rows(samples, transport), n)
    if transport.size == 1 or found.total == 0:
        cuts = n * np.arange(1, transport.size) // transport.size
    else:
        cuts = corrected(found, indices, transport)
    return np.concatenate([[0], cuts, [n]]).astype(np.int64)


def local_quantiles(indices: Indices, rank: int, size: int) -> NDArray[np.uint32]:
    """Return the number of indices, and SAMPLES of them at equal steps, or all of them: shape (SAMPLES + 1,).

    Each rank begins at another place within a step, so that together they say more than one.
    """
    row, count = np.zeros(SAMPLES + 1, np.uint32), len(indices)
    row[0] = count
    places = (np.arange(SAMPLES) + (rank + 0.5) / size) * count / SAMPLES
    samples = indices if count <= SAMPLES else indices[places.astype(np.int64)]
    row[1:1 + len(samples)] = samples
    return row


class Distribution:
    """An estimate of the places of all ranks' elements.

    The rows are local_quantiles of every rank, shape (P, SAMPLES + 1). The positions, int64, ascend strictly, and
    `below`, float64, tells about how many elements lie below each.
    """

    def __init__(self, rows: NDArray[np.uint32], n: int) -> None:
        lengths, quantiles = rows[:, 0].astype(np.int64), rows[:, 1:].astype(np.int64)
        samples = quantiles.shape[1]
        of_each = np.maximum(lengths / samples, 1)[:, None]
        weights = np.where(np.arange(samples) < lengths[:, None], of_each, 0).ravel()
        self.positions, place = np.unique(np.append(quantiles, n), return_inverse=True)
        at_each = np.bincount(place[:-1], weights, minlength=len(self.positions))
        self.below, self.total = np.cumsum(at_each) - at_each, int(lengths.sum())

    def at(self, below: NDArray[np.float64]) -> Indices:
        """Return the positions below which the number of elements is nearest to `below`."""
        after = np.searchsorted(self.below, below).clip(1, len(self.below) - 1)
        is_nearer_before = below - self.below[after - 1] < self.below[after] - below
        found: Indices = self.positions[after - is_nearer_before]
        return found


def corrected(found: Distribution, indices: Indices, transport: Transport) -> Indices:
    """Return the cuts, each moved until it lies within SLACK of its place, by counting elements below. Collective.

    A cut moves by what the samples say of its surroundings. If they mislead it, it moves between the nearest
    positions that are known to lie below and above. The indices are this rank's.
    """
    targets = found.total * np.arange(1, transport.size) / transport.size  # elements that are to lie below each cut
    cuts = found.at(targets)
    slack = max(SLACK * found.total / transport.size, transport.size)
    low, high = np.zeros_like(cuts), np.full_like(cuts, found.positions[-1])
    best, least, estimate = cuts, np.full(len(cuts), np.inf), targets
    for rounds in itertools.count(1):
        off = transport.allreduce(np.searchsorted(indices, cuts)) - targets
        best, least = np.where(np.abs(off) < least, cuts, best), np.minimum(np.abs(off), least)
        low, high = np.where(off < 0, cuts, low), np.where(off < 0, high, cuts)
        wrong = (least > slack) & (high - low > 1)
        if not wrong.any():
            break
        estimate = estimate - off
        cuts = found.at(estimate)
        cuts = np.where((rounds <= TRUSTED) & (low < cuts) & (cuts < high), cuts, (low + high) // 2)
        cuts = np.where(wrong, cuts, best)
    return np.maximum.accumulate(best)
