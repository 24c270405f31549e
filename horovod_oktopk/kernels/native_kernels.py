"""The kernels in C++: native/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .half_precision import HalfBits, HalfDtype
from .protocol import Array, CandidateBuffer, Integers, Words

try:
    from . import _native
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment, unused-ignore]

AVAILABLE = _native is not None
"""Whether the extension was built."""


class NativeKernels:
    """In C++."""

    name = "C++"

    def add_and_collect(self, residual: Array, gradient: Array, out: Array, scale: float, threshold: float,
                        first: int, buffer: CandidateBuffer, stream: bool, clear: bool, before: Sequence[Array] = (),
                        after: Sequence[Array] = ()) -> bool:
        finite, buffer.count = _native.add_and_collect(residual, gradient, out, scale, threshold, first,
                                                       buffer.indices, buffer.values, buffer.count, stream, clear,
                                                       before, after)
        return finite

    def subtract_and_collect(self, minuend: Array, subtrahend: Array, threshold: float, first: int,
                             buffer: CandidateBuffer) -> bool:
        finite, buffer.count = _native.subtract_and_collect(minuend, subtrahend, threshold, first, buffer.indices,
                                                            buffer.values, buffer.count)
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

    def to_levels(self, values: Array, levels: Array) -> Words:
        return _native.to_levels(np.ascontiguousarray(values), levels)

    def from_levels(self, words: Words, count: int, levels: Array, dtype: Any) -> Array:
        look_up = _native.single_from_levels if np.dtype(dtype) == np.float32 else _native.double_from_levels
        return look_up(words, count, levels)
