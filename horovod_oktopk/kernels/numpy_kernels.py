"""The kernels in NumPy, for machines without a C++ compiler, and as the reference for tests of the C++ ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from .protocol import CHUNK, LEVELS, Array, CandidateBuffer, HalfBits, Integers, Words


def _where_passing(values: Array, threshold: float) -> Integers:
    magnitudes, bound = np.abs(values), values.dtype.type(threshold)  # 0 where it is too small for the dtype
    return np.flatnonzero(magnitudes >= bound if bound > 0 else magnitudes > 0)


def _is_finite(chunk: Array) -> bool:
    """Return True if all is finite. A sum is finite only if its terms are; it may overflow though they are."""
    return bool(np.isfinite(chunk.sum()) or np.isfinite(chunk).all())


def _check_within(out: Array, indices: Integers) -> None:
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(out)):
        raise IndexError("an index lies outside of the array")


class NumpyKernels:
    """Kernels in NumPy, chunk by chunk."""

    name = "NumPy"

    def add_and_collect(self, residual: Array, gradient: Array, out: Array, scale: float, threshold: float,
                        first: int, buffer: CandidateBuffer, stream: bool, clear: bool,  # noqa: ARG002
                        before: Sequence[Array] = (), after: Sequence[Array] = ()) -> bool:
        finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(out), CHUNK):
                part = slice(start, start + CHUNK)
                terms = residual[part] if scale == 1.0 else residual[part] * out.dtype.type(scale)
                summands = [each[part] for each in (*before, gradient, *after)]
                np.add(terms, reduce(np.add, summands), out=out[part])
                finite = finite and _is_finite(out[part])
                self._collect(out[part], threshold, first + start, buffer)
                if clear:
                    gradient[part] = 0
        return finite

    def subtract_and_collect(self, minuend: Array, subtrahend: Array, threshold: float, first: int,
                             buffer: CandidateBuffer) -> bool:
        finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(minuend), CHUNK):
                difference = minuend[start:start + CHUNK] - subtrahend[start:start + CHUNK]
                finite = finite and _is_finite(difference)
                self._collect(difference, threshold, first + start, buffer)
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

    def to_half(self, values: Array) -> HalfBits:
        limit = np.finfo(np.float32).max
        singles = values.clip(-limit, limit).astype(np.float32, copy=False)
        bits = np.ascontiguousarray(singles).view(np.uint32)
        nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(nearest & 0x7FFF == 0x7F80, bits >> 16, nearest).astype(np.uint16)  # not up to infinity

    def from_half(self, bits: HalfBits, dtype: Any) -> Array:
        with np.errstate(invalid="ignore"):
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype)

    def to_levels(self, values: Array, levels: Array) -> Words:
        middles = (levels[1:].astype(np.float64) + levels[:-1]) / 2
        codes = np.zeros(-(-len(values) // 8) * 8, np.uint8)
        codes[:len(values)] = np.searchsorted(middles, np.abs(values), side="right") + LEVELS * np.signbit(values)
        return (codes[::2] | codes[1::2] << 4).view(np.uint32)

    def from_levels(self, words: Words, count: int, levels: Array, dtype: Any) -> Array:
        pairs = words.view(np.uint8)
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).ravel()[:count]
        values: Array = np.concatenate([levels, -levels]).astype(dtype)[codes]
        return values
