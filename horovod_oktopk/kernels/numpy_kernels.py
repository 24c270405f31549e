"""The loops over many elements in NumPy. The extension in C++ has the same methods, and gives the same bits.

"Passing" means to be a number that is not zero, infinity included, with a magnitude of at least the threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

HalfBits = NDArray[np.uint16]
"""bfloat16 numbers, as bits."""
Array = NDArray[Any]
Integers = NDArray[np.int64]
Words = NDArray[np.uint32]

LEVELS = 8
"""Number of magnitudes in a code of 4 bits."""
INFINITE = np.uint16(0x7F80)
"""Infinity in bfloat16."""
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


def _where_passing(values: Array, threshold: float) -> Integers:
    magnitudes, bound = np.abs(values), values.dtype.type(threshold)  # 0 where it is too small for the dtype
    return np.flatnonzero(magnitudes >= bound if bound > 0 else magnitudes > 0)


def _is_finite(chunk: Array) -> bool:
    """Return True if all is finite. A sum is finite only if its terms are; it may overflow though they are."""
    return bool(np.isfinite(chunk.sum()) or np.isfinite(chunk).all())


def _check_within(out: Array, indices: Integers) -> None:
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(out)):
        raise IndexError("an index lies outside of the array")


def _runs(array: Array, starts: Integers, offsets: Integers, first: int,
          values: Array) -> Iterator[tuple[slice, slice]]:
    """Check all runs; then yield where each lies in the array, and its part of the values."""
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(values) or len(lengths) != len(starts) or (lengths < 0).any():
        raise ValueError("the runs must have as many elements as there are values")
    if len(starts) and not ((starts >= first).all() and (starts - first + lengths <= len(array)).all()):
        raise IndexError("a run lies outside of the array")
    for start, (begin, end) in zip((starts - first).tolist(), pairwise(offsets.tolist()), strict=True):
        yield slice(start, start + end - begin), slice(begin, end)


class NumpyKernels:
    """Kernels for machines without a C++ compiler, and the reference for tests of those in C++."""

    name = "NumPy"

    def add_and_collect(self, residual: Array, gradient: Array, out: Array, scale: float, threshold: float,
                        first: int, buffer: CandidateBuffer, stream: bool, clear: bool,  # noqa: ARG002
                        before: Sequence[Array] = (), after: Sequence[Array] = ()) -> bool:
        """Set out = scale * residual + sum; collect elements that pass; return True if all of out is finite.

        The sum is of the arrays before the gradient, the gradient, and the arrays after it, added up in this order.
        All arrays are float32 or float64, of one dtype and one length, and contiguous; `first` is the index of their
        first element. `stream` is a hint that out need not stay in the cache. `clear` zeroes the gradient, which
        costs least while it is in the cache.
        """
        finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(out), CHUNK):
                part = slice(start, start + CHUNK)
                terms = residual[part] if scale == 1.0 else residual[part] * out.dtype.type(scale)
                summands = [each[part] for each in (*before, gradient, *after)]
                np.add(terms, reduce(np.add, summands), out=out[part])
                finite = finite and _is_finite(out[part])
                self.collect(out[part], threshold, first + start, buffer)
                if clear:
                    gradient[part] = 0
        return finite

    def subtract_and_collect(self, minuend: Array, subtrahend: Array, threshold: float, first: int,
                             buffer: CandidateBuffer) -> bool:
        """Collect elements of minuend - subtrahend that pass; return True if all of it is finite.

        Arrays as in `add_and_collect`; the difference is stored nowhere.
        """
        finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(minuend), CHUNK):
                difference = minuend[start:start + CHUNK] - subtrahend[start:start + CHUNK]
                finite = finite and _is_finite(difference)
                self.collect(difference, threshold, first + start, buffer)
        return finite

    def collect(self, acc: Array, threshold: float, first: int, buffer: CandidateBuffer) -> None:
        """Collect the elements of acc that pass."""
        for start in range(0, len(acc), CHUNK):
            if buffer.count > buffer.capacity:
                return
            chunk = acc[start:start + CHUNK]
            found = _where_passing(chunk, threshold)[:buffer.capacity + 1 - buffer.count]
            stop = buffer.count + len(found)
            buffer.indices[buffer.count:stop] = found + (first + start)
            buffer.values[buffer.count:stop] = chunk[found]
            buffer.count = stop

    def clear(self, out: Array, indices: Integers) -> None:
        """Set out[indices] = 0. Raise IndexError if an index lies outside of out, which then is unchanged."""
        _check_within(out, indices)
        out[indices] = 0

    def add(self, out: Array, indices: Integers, values: Array) -> None:
        """Set out[indices] += values, for indices that differ. Raise IndexError like `clear`."""
        _check_within(out, indices)
        out[indices] += values

    def add_runs(self, out: Array, starts: Integers, offsets: Integers, values: Array, first: int) -> None:
        """Add values to runs of out, whose first element has the index `first`; see `vectors.runs.Runs`.

        Raise IndexError if a run does not lie within out, which then is unchanged.
        """
        for run, part in _runs(out, starts, offsets, first, values):
            out[run] += values[part]

    def subtract_runs(self, minuend: Array, subtrahend: Array, starts: Integers, offsets: Integers, first: int,
                      out: Array) -> None:
        """Set out = minuend - subtrahend, in runs of these. Arrays and errors as in `add_runs`."""
        for run, part in _runs(minuend, starts, offsets, first, out):
            np.subtract(minuend[run], subtrahend[run], out=out[part])

    def scatter(self, out: Array, indices: Integers, values: Array, zero: bool = False) -> None:
        """Set out = 0, except out[indices] = values; `zero` tells that out is zero already.

        Raise IndexError if the indices do not ascend within out, which then is unchanged.
        """
        if len(indices) and not (indices[0] >= 0 and indices[-1] < len(out) and (np.diff(indices) > 0).all()):
            raise IndexError("the indices must ascend, and lie within the array")
        if not zero:
            out.fill(0)
        out[indices] = values

    def passing(self, indices: Integers, values: Array, threshold: float) -> tuple[Integers, Array]:
        """Return the elements of a sparse vector that pass, in memory of their own."""
        found = _where_passing(values, threshold)
        return indices[found], values[found]

    def sum_parts(self, indices: Sequence[Integers], values: Sequence[Array]) -> tuple[Integers, Array]:
        """Return the sum of sparse parts, each of ascending indices; values are added to zero in the parts' order."""
        union = np.unique(np.concatenate(indices))
        total = np.zeros(len(union), values[0].dtype)
        for part, mine in zip(indices, values, strict=True):
            total[np.searchsorted(union, part)] += mine
        return union, total

    def kth_magnitude(self, values: Array, k: int) -> float:
        """Return the k-th largest magnitude, k from 1, of float32 or float64 values, none of them NaN."""
        return float(np.partition(np.abs(values), -k)[-k])

    def common_positions(self, mine: Integers, other: Integers) -> Integers:
        """Return the positions in `mine` of the indices that `other` has too; both strictly ascending."""
        if not len(other):
            return np.empty(0, np.int64)
        at = np.searchsorted(other, mine)
        at[at == len(other)] = 0
        return np.flatnonzero(other[at] == mine)

    def pack_indices(self, indices: Integers, start: int, low_bits: int, low_words: int, upper_words: int) -> Words:
        """Return the Elias-Fano code of m strictly ascending indices >= start, by their offsets from start.

        The lower bits of the offsets lie one after the other in low_words of 32 bits. Then, in upper_words, there is
        a one at bit (offset >> low_bits) + i for the i-th. Lowest bits first. With no lower bits, i is left out: as
        offsets differ, there is one bit for each.
        """
        offsets = indices - start
        numbers = np.arange(len(indices)) if low_bits else 0
        low = np.zeros(32 * low_words, np.uint8)
        low[:len(indices) * low_bits] = (offsets[:, None] >> np.arange(low_bits) & 1).ravel()
        upper = np.zeros(32 * upper_words, np.uint8)
        upper[(offsets >> low_bits) + numbers] = 1
        return np.packbits(np.concatenate([low, upper]), bitorder="little").view(np.uint32)

    def unpack_indices(self, words: Words, count: int, start: int, stop: int, low_bits: int,
                       low_words: int) -> Integers:
        """Return the indices; none if the words do not hold `count`, strictly ascending within [start, stop)."""
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        upper = np.flatnonzero(bits[32 * low_words:])
        if len(upper) != count:
            return np.empty(0, np.int64)
        low = bits[:count * low_bits].reshape(count, low_bits) @ (1 << np.arange(low_bits))
        offsets = (upper - (np.arange(count) if low_bits else 0)) << low_bits | low
        valid = (np.diff(offsets, prepend=-1) > 0).all() and (offsets < stop - start).all()
        return offsets + start if valid else np.empty(0, np.int64)

    def to_half(self, values: Array) -> HalfBits:
        """Return the bfloat16 numbers nearest to finite float32 or float64 values; never infinite, ties to even."""
        limit = np.finfo(np.float32).max
        bits = values.clip(-limit, limit).astype(np.float32, copy=False).view(np.uint32)
        nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(nearest & 0x7FFF == 0x7F80, bits >> 16, nearest).astype(np.uint16)  # not up to infinity

    def from_half(self, bits: HalfBits, dtype: Any) -> Array:
        """Return the numbers that these bits stand for: float32 or float64."""
        with np.errstate(invalid="ignore"):
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype)

    def to_levels(self, values: Array, levels: Array) -> Words:
        """Return codes of 4 bits, eight to a word, lowest bits first; zeros past the end.

        A code is the number of the level that is nearest to the magnitude, plus 8 for negative values. Ties go to
        the larger level. The levels, float32 of shape (LEVELS,), are finite, and ascend from 0 or more.
        """
        middles = (levels[1:].astype(np.float64) + levels[:-1]) / 2
        codes = np.zeros(-(-len(values) // 8) * 8, np.uint8)
        codes[:len(values)] = np.searchsorted(middles, np.abs(values), side="right") + LEVELS * np.signbit(values)
        return (codes[::2] | codes[1::2] << 4).view(np.uint32)

    def from_levels(self, words: Words, count: int, levels: Array, dtype: Any) -> Array:
        """Return the levels, with their signs, that `count` codes stand for: float32 or float64."""
        pairs = words.view(np.uint8)
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).ravel()[:count]
        values: Array = np.concatenate([levels, -levels]).astype(dtype)[codes]
        return values

    def to_blocks(self, values: Array, levels: Array, block: int) -> tuple[Words, HalfBits]:
        """Return the codes of values as fractions of the largest magnitude of their block, and those in bfloat16.

        A block in which a value is not finite is infinite as a whole.
        """
        rows = _in_rows(values, block)
        largest = np.abs(rows).max(axis=1, initial=0)
        sound = np.isfinite(largest)
        scales = self.to_half(np.where(sound, largest, 0))
        scales[~sound] = INFINITE
        divisors = np.where(sound & (largest > 0), largest, 1)
        fractions = np.where(sound[:, None], rows, 1) / divisors[:, None]
        return self.to_levels(fractions.ravel()[:len(values)], levels), scales

    def from_blocks(self, words: Words, scales: HalfBits, count: int, levels: Array, block: int, dtype: Any) -> Array:
        """Return the values of `count` codes, each times the scale of its block: float32 or float64."""
        rows = _in_rows(self.from_levels(words, count, levels, dtype), block)
        with np.errstate(invalid="ignore"):  # 0 · infinity, past the end
            values: Array = (rows * self.from_half(scales, dtype)[:, None]).ravel()[:count]
        return values


def _in_rows(values: Array, length: int) -> Array:
    """Return values in rows, with zeros after them."""
    missing = -len(values) % length
    return (np.pad(values, (0, missing)) if missing else values).reshape(-1, length)
