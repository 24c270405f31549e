"""The interface of the loops over many elements. In C++ and in NumPy they give the same bits.

"Passing" means to be a number that is not zero, infinity included, with a magnitude of at least the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

HalfBits = NDArray[np.uint16]
"""bfloat16 numbers, as bits."""
Array = NDArray[Any]
Integers = NDArray[np.int64]
Words = NDArray[np.uint32]

LEVELS = 8
"""Number of magnitudes in a code of 4 bits."""
CHUNK = 1 << 16
"""Elements handled at a time: small enough that temporaries stay in the second-level cache."""


class CandidateBuffer:
    """A buffer of the elements that pass a threshold. If `count` exceeds `capacity`, some are missing.

    indices: int64, values: dtype; both shape (capacity + SLACK,), of which the first `count` are in use.
    """

    SLACK = 64

    def __init__(self, capacity: int, dtype: Any) -> None:
        self.capacity = capacity
        self.indices: Integers = np.empty(capacity + self.SLACK, np.int64)
        self.values: Array = np.empty(capacity + self.SLACK, dtype)
        self.count = 0


class Kernels(Protocol):
    """Loops over many elements."""

    name: str

    def add_and_collect(self, residual: Array, gradient: Array, out: Array, scale: float, threshold: float,
                        first: int, buffer: CandidateBuffer, stream: bool, clear: bool, before: Sequence[Array] = (),
                        after: Sequence[Array] = ()) -> bool:
        """Set out = scale * residual + sum; collect elements that pass; return True if all of out is finite.

        sum: of the arrays before the gradient, the gradient, and the arrays after it, added up in this order.
        All arrays: float32 or float64, one dtype, contiguous, one length. first: the index of their first element.
        stream: a hint, that out need not stay in the cache. clear: the gradient is zero afterwards, which costs least
        while it is in the cache.
        """

    def subtract_and_collect(self, minuend: Array, subtrahend: Array, threshold: float, first: int,
                             buffer: CandidateBuffer) -> bool:
        """Collect elements of minuend - subtrahend that pass; return True if all of it is finite.

        The difference is stored nowhere.

        Arrays as in `add_and_collect`.
        """

    def collect(self, acc: Array, threshold: float, first: int, buffer: CandidateBuffer) -> None:
        """Collect the elements of acc that pass."""

    def clear(self, out: Array, indices: Integers) -> None:
        """Set out[indices] = 0. Raise IndexError if an index lies outside of out, which then is unchanged."""

    def add(self, out: Array, indices: Integers, values: Array) -> None:
        """Set out[indices] += values, for indices that differ. Raise IndexError like `clear`."""

    def scatter(self, out: Array, indices: Integers, values: Array, zero: bool = False) -> None:
        """Set out = 0, except out[indices] = values. zero: True if out is zero already.

        Raise IndexError if the indices do not ascend within out, which then is unchanged.
        """

    def passing(self, indices: Integers, values: Array, threshold: float) -> tuple[Integers, Array]:
        """Return the elements of a sparse vector that pass, in memory of their own."""

    def sum_parts(self, indices: Sequence[Integers], values: Sequence[Array]) -> tuple[Integers, Array]:
        """Return the sum of sparse parts, each of ascending indices; values are added to zero in the parts' order."""

    def sorted(self, numbers: Array) -> Array:
        """Return unsigned integers of 32 or 64 bits, ascending."""

    def kth_magnitude(self, values: Array, k: int) -> float:
        """Return the k-th largest magnitude, k from 1, of float32 or float64 values, none of them NaN."""

    def common_positions(self, mine: Integers, other: Integers) -> Integers:
        """Return the positions in `mine` of the indices that `other` has too; both strictly ascending."""

    def pack_indices(self, indices: Integers, start: int, low_bits: int, low_words: int, upper_words: int) -> Words:
        """Return the Elias-Fano code of m strictly ascending indices >= start, by their offsets from start.

        The lower bits of the offsets lie one after the other in low_words of 32 bits. Then, in upper_words, there is
        a one at bit (offset >> low_bits) + i for the i-th. Lowest bits first.
        """

    def unpack_indices(self, words: Words, count: int, start: int, stop: int, low_bits: int,
                       low_words: int) -> Integers:
        """Return the indices; none if the words do not hold `count`, strictly ascending within [start, stop)."""

    def to_half(self, values: Array) -> HalfBits:
        """Return the nearest bfloat16 numbers, never infinite, ties to even. values: float32 or float64, finite."""

    def from_half(self, bits: HalfBits, dtype: Any) -> Array:
        """Return the numbers that these bits stand for: float32 or float64."""

    def to_levels(self, values: Array, levels: Array) -> Words:
        """Return codes of 4 bits, eight to a word, lowest bits first; zeros past the end.

        A code is the number of the level that is nearest to the magnitude, plus 8 for negative values. Ties go to
        the larger level. levels: float32, shape (LEVELS,), ascending from 0 or more, finite.
        """

    def from_levels(self, words: Words, count: int, levels: Array, dtype: Any) -> Array:
        """Return the levels, with their signs, that `count` codes stand for: float32 or float64."""
