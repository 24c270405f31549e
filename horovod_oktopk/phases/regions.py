"""Regions: how the index space is divided among the ranks (Section 3.1.1, Figure 1).

Two deviations from the paper, both for the promised volume; `docs/algorithm.md` says why:
the ranks average their *distributions* of top-k elements and cut that, instead of averaging their
cuts; and which rank owns which region is the rotation that keeps most elements where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Transport
from ..vectors.sparse import Indices
from ..vectors.wire import Extent

SAMPLES_PER_RANK = 16
"""Quantiles per region that each rank contributes: a region is off balance by 1/16 of k at most."""


@dataclass(frozen=True)
class Regions:
    """The regions of one step, their owners, and what the ranks selected in them; equal on all ranks.

    boundaries: int64, shape (P + 1,): offsets from 0 to n.
    counts: int64, shape (P, P): elements of rank i in region j.
    rotation: rank (j + rotation) mod P owns region j.
    """

    boundaries: Indices
    counts: NDArray[np.int64]
    rotation: int = 0

    @classmethod
    def owned_near(cls, boundaries: Indices, counts: NDArray[np.int64]) -> Regions:
        """With the owners who keep most elements where they are."""
        return cls(boundaries, counts, owner_rotation(counts))

    @property
    def order(self) -> NDArray[np.int64]:
        """The owners in the order of their regions: int64, shape (P,)."""
        return (np.arange(len(self.counts)) + self.rotation) % len(self.counts)

    @property
    def owners(self) -> list[int]:
        """The same as plain numbers."""
        return self.order.tolist()  # type: ignore[no-any-return]

    def of(self, rank: int) -> int:
        """The region that a rank owns."""
        return (rank - self.rotation) % len(self.counts)

    def extent(self, region: int, count: int) -> Extent:
        """Of so many elements of a region."""
        return Extent(count, int(self.boundaries[region]), int(self.boundaries[region + 1]))

    def extents(self, sizes: NDArray[np.int64]) -> list[Extent]:
        """Of a message of each region; sizes: its elements, by region."""
        return [self.extent(region, count) for region, count in enumerate(sizes.tolist())]


def count_by_region(indices: Indices, boundaries: Indices) -> NDArray[np.int64]:
    """How many of the ascending indices lie in each region: int64, shape (P,)."""
    return np.diff(np.searchsorted(indices, boundaries))


def space_repartition(indices: Indices, n: int, transport: Transport) -> Indices:
    """Boundaries that balance all ranks' local top-k; one allgather of 16 P + 1 words per rank.

    indices: int64, ascending: this rank's local top-k.
    Returns int64, shape (P + 1,): offsets from 0 to n, the same on every rank.
    """
    rows = transport.allgather(local_quantiles(indices, SAMPLES_PER_RANK * transport.size))
    return consensus(rows, n, transport.size)


def local_quantiles(indices: Indices, samples: int) -> Indices:
    """How many indices there are, and `samples` of them at equal steps: int64, shape (samples + 1,)."""
    row = np.zeros(samples + 1, np.int64)
    row[0] = len(indices)
    if len(indices):
        row[1:] = indices[np.arange(samples) * len(indices) // samples]
    return row


def consensus(rows: NDArray[np.int64], n: int, size: int) -> Indices:
    """Cuts the sum of all ranks' distributions into `size` regions of equal weight.

    rows: int64, shape (P, samples + 1): local_quantiles of every rank.
    """
    lengths, quantiles = rows[:, 0], rows[:, 1:]
    weights = np.repeat(lengths / quantiles.shape[1], quantiles.shape[1])
    positions = quantiles.ravel()
    total = weights.sum()
    if total == 0:
        return np.array([n * region // size for region in range(size + 1)], np.int64)
    order = np.argsort(positions, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    cuts = np.searchsorted(before, total * np.arange(1, size) / size * (1 - 1e-12))
    boundaries: Indices = np.concatenate([[0], np.append(positions[order], n)[cuts], [n]]).astype(np.int64)
    return boundaries


def owner_rotation(counts: NDArray[np.int64]) -> int:
    """The r for which rank (j + r) mod P owning region j keeps most elements at home; the least on a tie.

    counts: int64, shape (P, P): elements of rank i in region j. Some rotation keeps at least 1/P of
    all, so ranks send 2k(P-1)/P words on average, which the paper takes for granted.
    """
    size = len(counts)
    ranks = np.arange(size)
    kept = [int(counts[ranks, (ranks - rotation) % size].sum()) for rotation in range(size)]
    return int(np.argmax(kept))
