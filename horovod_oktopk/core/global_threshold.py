"""Global top-k by threshold, over the reduced elements that lie scattered over their owners.

The paper re-evaluates by gathering all reduced elements, up to P k of them: more than the volume it
promises. Here the exact k-th magnitude is found by radix search: four (float64: eight) allreduces of
256 counts, whatever k and P are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .sparse import SparseVector, Values

if TYPE_CHECKING:
    from ..transport.base import Transport

DIGIT_BITS = 8

LADDER = 2.0 ** (np.arange(-16, 17) / 16)
"""What a reused threshold is multiplied with, to see which of the products fits best: from half to twice."""


class GlobalThreshold:
    """The global threshold over the steps, equal on all ranks; None until the first evaluation."""

    def __init__(self, guard: float) -> None:
        self.guard = guard
        self.value: float | None = None

    def select(self, reduced: SparseVector, k: int, due: bool, region_order: NDArray[np.int64],
               fits: Callable[[NDArray[np.int64]], bool], transport: Transport,
               ) -> tuple[SparseVector, NDArray[np.int64]]:
        """What this rank's reduced elements contribute to the global top-k, and every rank's number of them.

        due: whether the period τ′ asks for a re-evaluation. Otherwise the threshold is reused, moved to that
        rung of a ladder around it which selects nearest to k; unless none selects between (1 - guard) k
        and (1 + guard) k in all and fits the promised volume. All ranks decide so together: the sizes that
        they gather anyway are gathered for all rungs at once.
        region_order: the owners in the order of their regions; ties go to the lower index.
        """
        reduced = reduced.compress(reduced.values != 0)
        if not due and self.value is not None:
            rungs = (self.value * LADDER).astype(reduced.values.dtype)
            sizes = transport.allgather(_counts_from(rungs, reduced.values))
            rung = self._best_rung(sizes, k, fits)
            if rung is not None:
                self.value = float(rungs[rung])
                return reduced.compress(np.abs(reduced.values) >= rungs[rung]), sizes[:, rung]
        self.value, ties = th_re_evaluate(reduced.values, k, transport)
        return _select_exactly(reduced, self.value, ties, region_order, transport)

    def _best_rung(self, sizes: NDArray[np.int64], k: int, fits: Callable[[NDArray[np.int64]], bool]) -> int | None:
        """The rung that selects nearest to k; None where the guard, or the volume, refuses all.

        sizes: int64, shape (P, rungs): elements of each rank that each rung selects.
        """
        deviations = np.abs(sizes.sum(axis=0) - k)
        for rung in np.argsort(deviations, kind="stable").tolist():
            if deviations[rung] > self.guard * k:
                return None
            if fits(sizes[:, rung]):
                return int(rung)
        return None


def th_re_evaluate(values: Values, k: int, transport: Transport) -> tuple[float, int]:
    """The exact k-th largest magnitude of all ranks' values, and how many elements equal to it belong
    to the top k. With fewer than k non-zero values in all: 0, and none.

    values: this rank's, non-zero.
    """
    bits = np.abs(values).view(f"u{values.dtype.itemsize}")
    prefix, wanted = 0, k
    for shift in range(8 * values.dtype.itemsize - DIGIT_BITS, -1, -DIGIT_BITS):
        digits = (bits >> bits.dtype.type(shift)).astype(np.int64) & (2**DIGIT_BITS - 1)
        histogram = transport.allreduce(np.bincount(digits, minlength=2**DIGIT_BITS).astype(np.int64))
        at_least = np.cumsum(histogram[::-1])[::-1]  # at_least[d]: values whose digit is d or more
        if at_least[0] < wanted:
            return 0.0, 0
        digit = int(np.flatnonzero(at_least >= wanted)[-1])
        wanted -= int(at_least[digit] - histogram[digit])
        prefix = prefix << DIGIT_BITS | digit
        bits = bits[digits == digit]
    return float(np.array([prefix], bits.dtype).view(values.dtype)[0]), wanted


def _counts_from(thresholds: Values, values: Values) -> NDArray[np.int64]:
    """How many values have at least each threshold's magnitude: int64, shape of thresholds."""
    magnitudes = np.sort(np.abs(values))
    counts: NDArray[np.int64] = len(magnitudes) - np.searchsorted(magnitudes, thresholds, side="left")
    return counts


def _select_exactly(reduced: SparseVector, threshold: float, ties: int, region_order: NDArray[np.int64],
                    transport: Transport) -> tuple[SparseVector, NDArray[np.int64]]:
    """Everything above the threshold, and of the elements equal to it the `ties` of lowest index."""
    magnitudes = np.abs(reduced.values)
    keep = magnitudes > threshold
    equal = np.flatnonzero(magnitudes == threshold)
    rows = transport.allgather(np.array([keep.sum(), len(equal)], np.int64))
    quota = np.empty(transport.size, np.int64)
    equal_before = np.cumsum(rows[region_order, 1]) - rows[region_order, 1]
    quota[region_order] = np.clip(ties - equal_before, 0, rows[region_order, 1])
    keep[equal[:quota[transport.rank]]] = True
    return reduced.compress(keep), rows[:, 0] + quota
