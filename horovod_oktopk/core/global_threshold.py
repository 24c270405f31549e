"""Global top-k by threshold, over the reduced elements that lie scattered over their owners.

The paper re-evaluates by gathering all reduced elements, up to P k of them: more than the volume it
promises. Here the exact k-th magnitude is found by radix search: four (float64: eight) allreduces of
256 counts, whatever k and P are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .sparse import SparseVector, Values
from .thresholds import top_k

if TYPE_CHECKING:
    from ..transport.base import Transport

DIGIT_BITS = 8

SKETCH = 64
"""Magnitudes that a rank tells of its largest 4k/P reduced elements, at equal steps of k/(16 P) elements."""


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
        selects less than (1 - guard) k or more than (1 + guard) k in all, or more than fits the promised
        volume. Then the ranks' sketches, which come with the sizes that are gathered anyway, tell what each
        is to send: k elements less k/(16 P) at most, near the exact top-k, without another message.
        region_order: the owners in the order of their regions; ties go to the lower index.
        """
        reduced = reduced.compress(reduced.values != 0)
        if not due and self.value is not None:
            magnitudes = np.abs(reduced.values)
            passes = magnitudes >= magnitudes.dtype.type(self.value)
            step = -(-k // (SKETCH // 4 * transport.size))
            rows = transport.allgather(np.append(passes.sum(), _sketch(magnitudes, step)))
            if abs(int(rows[:, 0].sum()) - k) <= self.guard * k and fits(rows[:, 0]):
                return reduced.compress(passes), rows[:, 0]
            taken = _take_from_sketches(rows[:, 1:], k // step)
            if k >= step and taken.any() and taken.max() < SKETCH:
                last = rows[:, 1:][np.arange(len(taken)), taken - 1][taken > 0].min()
                self.value = _from_bits(int(last), magnitudes.dtype)
                return top_k(reduced, int(taken[transport.rank]) * step), taken * step
        self.value, ties = th_re_evaluate(reduced.values, k, transport)
        return _select_exactly(reduced, self.value, ties, region_order, transport)


def _sketch(magnitudes: Values, step: int) -> NDArray[np.int64]:
    """The bits of the step-th largest magnitude, the 2 step-th, ...; 0 past the end: int64, shape (SKETCH,)."""
    descending = np.sort(magnitudes)[::-1][step - 1::step][:SKETCH]
    sketch = np.zeros(SKETCH, np.int64)
    sketch[:len(descending)] = _to_bits(descending)
    return sketch


def _take_from_sketches(sketches: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """How many entries of each sketch are among the `wanted` largest of all: int64, shape (P,).

    Entries are bits of magnitudes, which have the order of the magnitudes. Ties go to the lower rank.
    """
    order = np.argsort(-sketches.ravel(), kind="stable")[:wanted]
    order = order[sketches.ravel()[order] > 0]
    return np.bincount(order // sketches.shape[1], minlength=len(sketches)).astype(np.int64)


def _to_bits(magnitudes: Values) -> NDArray[np.int64]:
    return np.ascontiguousarray(magnitudes).view(f"u{magnitudes.dtype.itemsize}").astype(np.int64)


def _from_bits(bits: int, dtype: np.dtype[Any]) -> float:
    return float(np.array([bits], f"u{dtype.itemsize}").view(dtype)[0])


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
    return _from_bits(prefix, values.dtype), wanted


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
