"""Quantile sketches: two magnitudes with the k-th largest of all ranks' between them.

A rank tells every `step`-th of its magnitudes in descending order. On many ranks each begins at a place of its own
within the first step. Then, whatever the magnitudes are, `step` times the number of entries that are at least t is on
the mean the number of magnitudes that are. The errors of P ranks, of less than a step each, nearly cancel: the sum is
wrong by √P steps, or less. That is *likely*. *Certain* are P steps, used if the likely ones do not suffice.
Magnitudes travel as bits, which have their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Counts
from ..vectors.sparse import Bits

MIN_ENTRIES, MAX_ENTRIES = 16, 512
REACH, REACH_OF_MANY = 4, 2
"""Reach of a sketch: down to the 4k/P-th element of its rank, four times what the mean rank contributes.

On many ranks it reaches half as far: regions are balanced, and a radix search, if one is needed, costs the same on
any P.
"""
FEW_RANKS = 16
"""Ranks up to which they are few; more than these are many."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""A number whose multiples, modulo 1, are spread evenly, however many there are (Weyl, 1916)."""


def sketch_shape(k: int, size: int) -> tuple[int, int]:
    """Return (numbers of a sketch, its threshold and largest magnitude included; elements from one to the next).

    Sketches are about as long as the messages gathered after them: with few ranks two steps of each, with many 2/√P
    steps, and about twice as much again, as there must be room for more than the mean.
    """
    if size <= FEW_RANKS:
        covered, between = REACH * k, 2.0
    else:
        covered, between = REACH_OF_MANY * k, 6 / math.sqrt(size)
    entries = min(MAX_ENTRIES, max(MIN_ENTRIES, math.isqrt(int(between * covered / size))))
    return entries, -(-covered // (size * (entries - 2)))


def first_places(step: int, size: int) -> Counts:
    """Return the place of each rank's first entry among its magnitudes, from 1 to the step: int64, shape (P,)."""
    if size <= FEW_RANKS:
        return np.full(size, step)
    return 1 + (np.arange(1, size + 1) * GOLDEN % 1 * step).astype(np.int64)


def sketch(ascending: Bits, step: int, entries: int, first: int | None = None) -> Bits:
    """Return the largest magnitude; the first-th largest (first: step), the step-th after it, ...; 0 past the end.

    Shape (entries,).
    """
    found = ascending[::-1][(first or step) - 1::step][:entries - 1]
    row = np.zeros(entries, ascending.dtype)
    row[0], row[1:1 + len(found)] = ascending.max(initial=0), found
    return row


@dataclass(frozen=True)
class Bracket:
    """A range lowest <= k-th magnitude < limit, for certain or probably.

    Each rank has `at_most` elements in the range, as surely: int64, shape (P,).
    """

    lowest: int
    limit: int
    at_most: Counts


@dataclass(frozen=True)
class Sketches:
    """The sketches of all ranks.

    `largest` holds their largest magnitudes, shape (P,). The entries have shape (P, m); entry j is the
    (first + j * step)-th largest of the rank's, or 0.
    """

    largest: Bits
    entries: Bits
    step: int

    def bracket(self, k: int) -> Bracket | None:
        """Return bounds between which the k-th magnitude of all ranks certainly lies, if there are k magnitudes.

        None if a sketch does not reach that far down. A rank has as many elements of at least t as its entries tell,
        and fewer than a step more.
        """
        size, entries = self.entries.shape
        weights = np.full(self.entries.shape, self.step)
        weights[:, 0] = first_places(self.step, size)
        at_least = np.cumsum(weights.ravel()[self._order])  # so many magnitudes are at and above each entry
        if at_least[-1] < k:
            return None
        lowest = max(int(self._descending[np.searchsorted(at_least, k)]), 1)
        most_told = k - 1 - (self.step - 1) * size  # with step - 1 more on every rank, these are fewer than k still
        limit = (int(self._descending[np.searchsorted(at_least, most_told, side="right")]) + 1 if most_told >= 0
                 else int(np.iinfo(self.entries.dtype).max))
        if self._reached(lowest).max() == entries:
            return None
        at_most = self.step * (self._reached(lowest) - self._reached(limit)) + self.step - 1
        return Bracket(lowest, limit, at_most)

    def likely_bracket(self, k: int, certain: Bracket) -> Bracket | None:
        """Return bounds between which the k-th magnitude probably lies, and how many elements of each rank at most.

        None on few ranks, as the certain bounds are hardly wider, and if there may be fewer than k magnitudes.
        """
        if len(self.entries) <= FEW_RANKS or certain.lowest == 1:
            return None
        expected = self.step * np.arange(1, self.entries.size + 1)
        spread = math.sqrt(len(self.entries) * self.step**2)
        places = np.searchsorted(expected, (k + spread, max(k - spread, 0))).clip(max=len(expected) - 1)
        low, high = self._descending[places].tolist()
        lowest, limit = max(low, certain.lowest), min(high + 1, certain.limit)
        mean = np.maximum(self._place(lowest) - self._place(limit), 0)
        at_most = np.ceil(mean + 4 * np.sqrt(mean + 1) + 2).astype(np.int64)
        return Bracket(lowest, limit, np.minimum(at_most, certain.at_most))

    @cached_property
    def _order(self) -> Counts:
        return np.argsort(self.entries.ravel(), kind="stable")[::-1]

    @cached_property
    def _descending(self) -> Bits:
        return self.entries.ravel()[self._order]

    def _reached(self, bits: int) -> Counts:
        reached: Counts = np.count_nonzero(self.entries >= self.entries.dtype.type(bits), axis=1)
        return reached

    def _place(self, bits: int) -> NDArray[np.float64]:
        """Estimate how many elements of each rank are at least `bits`, as if spread evenly between entries."""
        edges = np.column_stack([self.largest, self.entries, np.zeros_like(self.largest)]).astype(np.float64)
        above = (edges[:, :-1] >= bits).sum(axis=1)
        ranks = np.arange(len(edges))
        upper, lower = edges[ranks, np.maximum(above - 1, 0)], edges[ranks, above]
        part = (upper - bits) / np.maximum(upper - lower, 1)
        return np.where(above > 0, self.step * (above - 1 + part), 0.0)
