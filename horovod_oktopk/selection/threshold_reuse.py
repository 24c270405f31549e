"""The global threshold as the paper has it: evaluated every τ′ steps, reused in between; here with a guard.

A reused threshold costs one message fewer than an exact one, and selects more or less than k.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..kernels import KERNELS
from ..transport.base import Transport
from ..vectors.sparse import SparseVector, from_bits, to_bits
from .global_top_k import Counts, ExactThreshold
from .local_top_k import top_k
from .sketches import sketch

SKETCH = 64
"""Magnitudes that a rank tells of its largest 4k/P reduced elements, at equal steps of k/(16 P) elements."""


class ReusedThreshold(ExactThreshold):
    """A threshold that is evaluated, and then reused while it selects about k."""

    guard = 0.25
    """The share of k that a reused threshold's selection may deviate by."""

    def select_again(self, reduced: SparseVector, k: int, region_order: Counts, fits: Callable[[Counts], bool],
                     transport: Transport, local_threshold: float = 0.0) -> tuple[SparseVector, Counts]:
        """Select by the last threshold; all, if there are at most k elements. Return as `select` does. Collective.

        If the last threshold selects less than (1 - guard) k, more than (1 + guard) k, or more than fits the promised
        volume, sketches decide. They come with the sizes that are gathered anyway, and tell each rank's number to
        send: k elements in all, less k/(16 P) at most, near the exact top-k, without another message.
        """
        assert self.value is not None
        reduced = reduced.compress(reduced.values != 0)
        magnitudes = np.abs(reduced.values)
        passes = magnitudes >= magnitudes.dtype.type(self.value)
        step = -(-k // (SKETCH // 4 * transport.size))
        mine = sketch(KERNELS.sorted(to_bits(magnitudes)), step, 1 + SKETCH)
        floor = to_bits(np.array([local_threshold], magnitudes.dtype))
        counts = np.array([len(reduced), passes.sum()])
        rows = transport.allgather(np.concatenate([counts, floor.astype(np.int64), mine.astype(np.int64)]))
        lengths, sizes, floors, largest, sketches = *rows[:, :4].T, rows[:, 4:]
        keeps_all = lengths.sum() <= k
        if keeps_all:
            self.value = 0.0
        self._note_ends(floors, largest, magnitudes.dtype)
        if keeps_all:
            return reduced, lengths
        if abs(int(sizes.sum()) - k) <= self.guard * k and fits(sizes):
            return reduced.compress(passes), sizes
        taken = _take_from_sketches(sketches, k // step)
        if k < step or not taken.any() or taken.max() == SKETCH:
            return self.select(reduced, k, region_order, transport, local_threshold)
        last = sketches[np.arange(len(taken)), taken - 1][taken > 0].min()
        self.value = from_bits(int(last), magnitudes.dtype)
        self._note_ends(floors, largest, magnitudes.dtype)
        return top_k(reduced, int(taken[transport.rank]) * step), taken * step


def _take_from_sketches(sketches: Counts, wanted: int) -> Counts:
    """Return how many entries of each sketch are among the `wanted` largest of all: int64, shape (P,).

    Entries are bits of magnitudes, which have the order of the magnitudes. Ties go to the lower rank.
    """
    order = np.argsort(-sketches.ravel(), kind="stable")[:wanted]
    order = order[sketches.ravel()[order] > 0]
    return np.bincount(order // sketches.shape[1], minlength=len(sketches)).astype(np.int64)
