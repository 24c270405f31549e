"""Space repartition (Section 3.1.1, lines 5 to 7): cuts between regions that give their owners equal work.

A deviation from the paper, for the promised volume; `docs/algorithm.md` says why: the ranks average their
*distributions* of top-k elements and cut that, instead of averaging their cuts. A rank tells O(P) words.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Transport, allgather_rows
from ..vectors.sparse import Indices

SAMPLES = 64
"""Quantiles that each rank contributes to a cut."""
SLACK = 1 / 32
"""Largest distance of a cut from its place, as a share of a region's mean weight; or one element for each rank,
if that is more, as all ranks may hold the same index.
"""
TRUSTED = 4
"""Rounds in which cuts are corrected by the samples; after them intervals are halved."""


def space_repartition(indices: Indices, n: int, transport: Transport) -> Indices:
    """Return boundaries that balance all ranks' local top-k. Collective.

    No region is more than a sixteenth, or 2P, above the mean. indices: int64, ascending: this rank's local top-k.
    Return int64, shape (P + 1,): offsets from 0 to n, the same on every rank. A rank tells 65 words, and then 2P in
    each round of counting: one round, if the samples suffice.
    """
    samples = local_quantiles(indices, transport.rank, transport.size)
    found = Distribution.of(allgather_rows(samples, transport), n)
    cuts = found.cuts if transport.size == 1 or found.total == 0 else corrected(found, indices, transport)
    return np.concatenate([[0], cuts, [n]]).astype(np.int64)


def local_quantiles(indices: Indices, rank: int, size: int) -> NDArray[np.uint32]:
    """Return the number of indices, and SAMPLES of them at equal steps, or all of them: shape (SAMPLES + 1,).

    Each rank begins at another place within a step, so that together they say more than one.
    """
    row, count = np.zeros(SAMPLES + 1, np.uint32), len(indices)
    row[0] = count
    if count <= SAMPLES:
        row[1:1 + count] = indices
    else:
        places = (np.arange(SAMPLES) + (rank + 0.5) / size) * count / SAMPLES
        row[1:] = indices[places.astype(np.int64)]
    return row


@dataclass(frozen=True)
class Distribution:
    """An estimate of the places of all ranks' elements, from their quantiles.

    positions: int64, strictly ascending; below: float64: about how many elements lie below each. size: the ranks.
    """

    positions: Indices
    below: NDArray[Any]
    total: int
    size: int

    @classmethod
    def of(cls, rows: NDArray[np.uint32], n: int) -> Distribution:
        """Estimate the distribution from rows, shape (P, SAMPLES + 1): local_quantiles of every rank."""
        lengths, quantiles = rows[:, 0].astype(np.int64), rows[:, 1:].astype(np.int64)
        samples = quantiles.shape[1]
        of_each = np.maximum(lengths / samples, 1)[:, None]
        weights = np.where(np.arange(samples) < lengths[:, None], of_each, 0).ravel()
        positions, place = np.unique(np.append(quantiles, n), return_inverse=True)
        at_each = np.bincount(place[:-1], weights, minlength=len(positions))
        return cls(positions, np.cumsum(at_each) - at_each, int(lengths.sum()), len(rows))

    @property
    def targets(self) -> NDArray[np.float64]:
        """Elements that are to lie below each cut: float64, shape (P - 1,)."""
        return self.total * np.arange(1, self.size) / self.size

    @property
    def cuts(self) -> Indices:
        """The cuts between regions of about equal weight: int64, shape (P - 1,)."""
        if self.total == 0:
            return int(self.positions[-1]) * np.arange(1, self.size) // self.size
        return self.at(self.targets)

    def at(self, below: NDArray[np.float64]) -> Indices:
        """Return the positions below which the number of elements is nearest to `below`."""
        after = np.searchsorted(self.below, below).clip(1, len(self.below) - 1)
        is_nearer_before = below - self.below[after - 1] < self.below[after] - below
        found: Indices = self.positions[after - is_nearer_before]
        return found


def corrected(found: Distribution, indices: Indices, transport: Transport) -> Indices:
    """Return the cuts, each moved until it lies within SLACK of its place, by counting elements below. Collective.

    A cut moves by what the samples say of its surroundings. If they mislead it, it moves between the nearest
    positions that are known to lie below and above. indices: this rank's.
    """
    targets, cuts = found.targets, found.cuts
    slack = max(SLACK * found.total / found.size, found.size)
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
