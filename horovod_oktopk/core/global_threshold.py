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


class GlobalThreshold:
    """The global threshold over the steps, equal on all ranks; None until the first evaluation."""

    def __init__(self, guard: float) -> None:
        self.guard = guard
        self.value: float | None = None

    def select(self, reduced: SparseVector, k: int, due: bool, region_order: NDArray[np.int64],
               fits: Callable[[NDArray[np.int64]], bool], transport: Transport,
               ) -> tuple[SparseVector, NDArray[np.int64]]:
        """What this rank's reduced elements contribute to the global top-k, and every rank's number of them.

        due: whether the period τ′ asks for a re-evaluation. Otherwise the threshold is reused, unless it
        selects less than (1 - guard) k or more than (1 + guard) k in all, or the sizes do not fit the
        promised volume; all ranks decide so together, from the sizes that they gather anyway.
        region_order: the owners in the order of their regions; ties go to the lower index.
        """
        reduced = reduced.compress(reduced.values != 0)
        if not due and self.value is not None:
            chosen = reduced.compress(np.abs(reduced.values) >= self.value)
            sizes = transport.allgather(np.array([len(chosen)], np.int64))[:, 0]
            if abs(int(sizes.sum()) - k) <= self.guard * k and fits(sizes):
                return chosen, sizes
        self.value, ties = th_re_evaluate(reduced.values, k, transport)
        return _select_exactly(reduced, self.value, ties, region_order, transport)


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
