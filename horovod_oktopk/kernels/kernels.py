"""The loops over many elements: in C++ where the extension was built, in NumPy elsewhere, with the same bits.

Both know the same functions, so an accumulator takes either. "Passing" means to be a number that is
not zero, infinity included, with a magnitude of at least the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import half_precision
from .half_precision import HalfBits, HalfDtype

try:
    from . import _native
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment, unused-ignore]

Array = NDArray[Any]
Integers = NDArray[np.int64]
Words = NDArray[np.uint32]

CHUNK = 1 << 16
"""Elements handled at a time: small enough that temporaries stay in the second-level cache."""


class CandidateBuffer:
    """Where passing elements are collected, up to `capacity`. Of more, not all are here, and `count` exceeds it.

    indices: int64, values: dtype; both shape (capacity + SLACK,), of which the first `count` are in use.
    """

    SLACK = 64

    def __init__(self, capacity: int, dtype: Any) -> None:
        self.capacity = capacity
        self.indices: Integers = np.empty(capacity + self.SLACK, np.int64)
        self.values: Array = np.empty(capacity + self.SLACK, dtype)
        self.count = 0


class Kernels(Protocol):
    """What is done with many elements."""

    name: str

    def add_and_collect(self, residual: Array, gradient: Array, out: Array, scale: float, threshold: float,
                        first: int, buffer: CandidateBuffer, stream: bool, clear: bool) -> bool:
        """out = scale * residual + gradient; says whether all of out is finite, and collects what passes.

        All arrays: float32 or float64, one dtype, contiguous, one length. first: the index of their first element.
        stream: a hint, that out need not stay in the cache. clear: the gradient is zero afterwards, which costs least
        while it is in the cache.
        """

    def collect(self, acc: Array, threshold: float, first: int, buffer: CandidateBuffer) -> None:
        """Collects the elements of acc that pass."""

    def clear(self, out: Array, indices: Integers) -> None:
        """out[indices] = 0. Raises IndexError where an index lies outside of out, which then is as it was."""

    def add(self, out: Array, indices: Integers, values: Array) -> None:
        """out[indices] += values, of indices that differ. Raises IndexError like `clear`."""

    def scatter(self, out: Array, indices: Integers, values: Array, zero: bool = False) -> None:
        """out = 0, but for out[indices] = values. zero: whether out is zero already.

        Raises IndexError where the indices do not ascend within out, which then is as it was.
        """

    def passing(self, indices: Integers, values: Array, threshold: float) -> tuple[Integers, Array]:
        """The elements of a sparse vector that pass, in memory of their own."""

    def sum_parts(self, indices: Sequence[Integers], values: Sequence[Array]) -> tuple[Integers, Array]:
        """The sum of sparse parts, each of ascending indices; values are added to zero in the order of the parts."""

    def sorted(self, numbers: Array) -> Array:
        """Unsigned integers of 32 or 64 bits, ascending."""

    def kth_magnitude(self, values: Array, k: int) -> float:
        """The k-th largest magnitude, k from 1, of float32 or float64 values, none of them NaN."""

    def common_positions(self, mine: Integers, other: Integers) -> Integers:
        """Positions in `mine` of the indices that `other` has too; both strictly ascending."""

    def pack_indices(self, indices: Integers, start: int, low_bits: int, low_words: int, upper_words: int) -> Words:
        """Elias-Fano code of m strictly ascending indices >= start: of their offsets from it, the lower bits one
        after the other in low_words of 32 bits; then, in upper_words, a one at bit (offset >> low_bits) + i for the
        i-th. Lowest bits first."""

    def unpack_indices(self, words: Words, count: int, start: int, stop: int, low_bits: int,
                       low_words: int) -> Integers:
        """The indices; none at all where the words do not hold `count`, strictly ascending within [start, stop)."""

    def to_half(self, values: Array, name: HalfDtype) -> HalfBits:
        """The nearest numbers of 16 bits to finite ones; see `halves.to_halves`."""

    def from_half(self, bits: HalfBits, name: HalfDtype, dtype: Any) -> Array:
        """The numbers that these bits stand for: float32 or float64."""


def _where_passing(values: Array, threshold: float) -> Integers:
    magnitudes = np.abs(values)
    return np.flatnonzero(magnitudes >= values.dtype.type(threshold) if threshold > 0 else magnitudes > 0)


def _check_within(out: Array, indices: Integers) -> None:
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(out)):
        raise IndexError("an index lies outside of the array")


class NumpyKernels:
    """In NumPy, chunk by chunk."""

    name = "NumPy"

    def add_and_collect(self, residual: Array, gradient: Array, out: Array, scale: float, threshold: float,
                        first: int, buffer: CandidateBuffer, stream: bool, clear: bool) -> bool:  # noqa: ARG002
        finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(out), CHUNK):
                part = slice(start, start + CHUNK)
                terms = residual[part] if scale == 1.0 else residual[part] * out.dtype.type(scale)
                np.add(terms, gradient[part], out=out[part])
                # A sum is finite only if its terms are; it may overflow though they are.
                finite = finite and bool(np.isfinite(out[part].sum()) or np.isfinite(out[part]).all())
                self._collect(out[part], threshold, first + start, buffer)
                if clear:
                    gradient[part] = 0
        return finite

    def collect(self, acc: Array, threshold: float, first: int, buffer: CandidateBuffer) -> None:
        for start in range(0, len(acc), CHUNK):
            self._collect(acc[start:start + CHUNK], threshold, first + start, buffer)

    def _collect(self, chunk: Array, threshold: float, first: int, buffer: CandidateBuffer) -> None:
        if buffer.count > buffer.capacity:
            return
        found = _where_passing(chunk, threshold)[:buffer.capacity + 1 - buffer.count]
        stop = buffer.count + len(found)
        buffer.indices[buffer.count:stop] = found + first
        buffer.values[buffer.count:stop] = chunk[found]
        buffer.count = stop

    def clear(self, out: Array, indices: Integers) -> None:
        _check_within(out, indices)
        out[indices] = 0

    def add(self, out: Array, indices: Integers, values: Array) -> None:
        _check_within(out, indices)
        out[indices] += values

    def scatter(self, out: Array, indices: Integers, values: Array, zero: bool = False) -> None:
        if len(indices) and not (indices[0] >= 0 and indices[-1] < len(out) and (np.diff(indices) > 0).all()):
            raise IndexError("the indices must ascend, and lie within the array")
        if not zero:
            out.fill(0)
        out[indices] = values

    def passing(self, indices: Integers, values: Array, threshold: float) -> tuple[Integers, Array]:
        found = _where_passing(values, threshold)
        return indices[found], values[found]

    def sum_parts(self, indices: Sequence[Integers], values: Sequence[Array]) -> tuple[Integers, Array]:
        union = np.unique(np.concatenate(indices))
        total = np.zeros(len(union), values[0].dtype)
        for part, mine in zip(indices, values, strict=True):
            total[np.searchsorted(union, part)] += mine
        return union, total

    def sorted(self, numbers: Array) -> Array:
        return np.sort(numbers)

    def kth_magnitude(self, values: Array, k: int) -> float:
        return float(np.partition(np.abs(values), len(values) - k)[len(values) - k])

    def common_positions(self, mine: Integers, other: Integers) -> Integers:
        if not len(other):
            return np.empty(0, np.int64)
        at = np.searchsorted(other, mine)
        at[at == len(other)] = 0
        return np.flatnonzero(other[at] == mine)

    def pack_indices(self, indices: Integers, start: int, low_bits: int, low_words: int, upper_words: int) -> Words:
        offsets = indices - start
        low = np.zeros(32 * low_words, np.uint8)
        low[:len(indices) * low_bits] = (offsets[:, None] >> np.arange(low_bits) & 1).ravel()
        upper = np.zeros(32 * upper_words, np.uint8)
        upper[(offsets >> low_bits) + np.arange(len(indices))] = 1
        return np.packbits(np.concatenate([low, upper]), bitorder="little").view(np.uint32)

    def unpack_indices(self, words: Words, count: int, start: int, stop: int, low_bits: int,
                       low_words: int) -> Integers:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        upper = np.flatnonzero(bits[32 * low_words:])
        if len(upper) != count:
            return np.empty(0, np.int64)
        low = bits[:count * low_bits].reshape(count, low_bits) @ (1 << np.arange(low_bits))
        offsets = (upper - np.arange(count)) << low_bits | low
        valid = (np.diff(offsets, prepend=-1) > 0).all() and (offsets < stop - start).all()
        return offsets + start if valid else np.empty(0, np.int64)

    def to_half(self, values: Array, name: HalfDtype) -> HalfBits:
        return half_precision.to_half(values, name)

    def from_half(self, bits: HalfBits, name: HalfDtype, dtype: Any) -> Array:
        return half_precision.from_half(bits, name, dtype)


class NativeKernels:
    """In C++: native.cpp."""

    name = "C++"

    def add_and_collect(self, residual: Array, gradient: Array, out: Array, scale: float, threshold: float,
                        first: int, buffer: CandidateBuffer, stream: bool, clear: bool) -> bool:
        finite, buffer.count = _native.add_and_collect(residual, gradient, out, scale, threshold, first,
                                                       buffer.indices, buffer.values, buffer.count, stream, clear)
        return finite

    def collect(self, acc: Array, threshold: float, first: int, buffer: CandidateBuffer) -> None:
        buffer.count = _native.collect(acc, threshold, first, buffer.indices, buffer.values, buffer.count)

    def clear(self, out: Array, indices: Integers) -> None:
        _native.clear(out, np.ascontiguousarray(indices))

    def add(self, out: Array, indices: Integers, values: Array) -> None:
        _native.add(out, np.ascontiguousarray(indices), np.ascontiguousarray(values))

    def scatter(self, out: Array, indices: Integers, values: Array, zero: bool = False) -> None:
        _native.scatter(out, np.ascontiguousarray(indices), np.ascontiguousarray(values), zero)

    def passing(self, indices: Integers, values: Array, threshold: float) -> tuple[Integers, Array]:
        return _native.passing(np.ascontiguousarray(indices), np.ascontiguousarray(values), threshold)

    def sum_parts(self, indices: Sequence[Integers], values: Sequence[Array]) -> tuple[Integers, Array]:
        return _native.sum_parts(indices, values)

    def sorted(self, numbers: Array) -> Array:
        return _native.sorted(numbers)

    def kth_magnitude(self, values: Array, k: int) -> float:
        return _native.kth_magnitude(np.ascontiguousarray(values), k)

    def common_positions(self, mine: Integers, other: Integers) -> Integers:
        return _native.common_positions(mine, other)

    def pack_indices(self, indices: Integers, start: int, low_bits: int, low_words: int, upper_words: int) -> Words:
        return _native.pack_indices(indices, start, low_bits, low_words, upper_words)

    def unpack_indices(self, words: Words, count: int, start: int, stop: int, low_bits: int,
                       low_words: int) -> Integers:
        return _native.unpack_indices(words, count, start, stop, low_bits, low_words)

    def to_half(self, values: Array, name: HalfDtype) -> HalfBits:
        return _native.to_half(np.ascontiguousarray(values), name == "bfloat16")

    def from_half(self, bits: HalfBits, name: HalfDtype, dtype: Any) -> Array:
        widen = _native.single_from_half if np.dtype(dtype) == np.float32 else _native.double_from_half
        return widen(np.ascontiguousarray(bits), name == "bfloat16")


KERNELS: Kernels = NumpyKernels() if _native is None else NativeKernels()
"""The fastest that there are here."""
