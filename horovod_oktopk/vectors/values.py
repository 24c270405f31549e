"""Values as words of 32 bits, and back: unchanged, in 16 bits, or in 4.

In 4 bits a value is a sign, and the number of the level nearest to its magnitude, of eight. Both ends of the levels
come with each message as bfloat16 numbers, and the levels lie evenly between them as bits: bits of a float grow about
as its logarithm does. So levels are found by integer arithmetic, the same on every machine; they are bfloat16 numbers
themselves, and none is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels import Kernels
from ..kernels.half_precision import HalfBits, HalfDtype, from_half, to_half
from ..kernels.protocol import LEVELS, Words
from .sparse import Values

ValueDtype = Literal["float16", "bfloat16", "log4"]
Ends = tuple[float, float]
"""The (lowest, largest) magnitude that is sent. 0 as the lowest: it is not known."""

DEPTH = 8 << 7
"""Span of the levels, except zero, if the lowest is not known: 8 octaves, of 2**7 bfloat16 numbers each."""
FEW = 2
"""Number of values up to which bfloat16 takes fewer words than the ends and 4 bits for each."""


class ValueFormat(Protocol):
    """A format of values on the wire. Values: float32 or float64, shape (m,), finite."""

    def words(self, count: int) -> int:
        """Return how many words of 4 bytes the values of a message with `count` elements take."""

    def round(self, values: Values) -> Values:
        """Return the values that arrive, however they are divided into messages."""

    def pack(self, values: Values) -> Words:
        """Write values that `round` leaves as they are: uint32, shape (words(m),)."""

    def unpack(self, words: Words, count: int) -> Values:
        """Read the values of a message."""


@dataclass(frozen=True)
class Plain:
    """Values as they are in memory."""

    dtype: Any

    def words(self, count: int) -> int:
        return count * np.dtype(self.dtype).itemsize // 4

    def round(self, values: Values) -> Values:
        return values

    def pack(self, values: Values) -> Words:
        return np.ascontiguousarray(values).view(np.uint32)

    def unpack(self, words: Words, count: int) -> Values:  # noqa: ARG002
        return words.view(self.dtype)


@dataclass(frozen=True)
class Halves:
    """Values in 16 bits."""

    dtype: Any
    name: HalfDtype
    kernels: Kernels

    def words(self, count: int) -> int:
        return -(-count // 2)

    def round(self, values: Values) -> Values:
        return self.kernels.from_half(self.kernels.to_half(values, self.name), self.name, self.dtype)

    def pack(self, values: Values) -> Words:
        halves = np.zeros(2 * self.words(len(values)), np.uint16)
        halves[:len(values)] = self.kernels.to_half(values, self.name)
        return halves.view(np.uint32)

    def unpack(self, words: Words, count: int) -> Values:
        return self.kernels.from_half(words.view(np.uint16)[:count], self.name, self.dtype)


@dataclass(frozen=True)
class Levels:
    """Values in 4 bits. A message has a word with the ends, and then the codes; or up to FEW levels themselves."""

    dtype: Any
    ends: Ends
    kernels: Kernels

    def words(self, count: int) -> int:
        return self._few.words(count) if count <= FEW else 1 + -(-count // 8)

    def round(self, values: Values) -> Values:
        codes = self.kernels.to_levels(values, self._levels)
        return self.kernels.from_levels(codes, len(values), self._levels, self.dtype)

    def pack(self, values: Values) -> Words:
        if len(values) <= FEW:
            return self._few.pack(values)
        return np.concatenate([self._bits.view(np.uint32), self.kernels.to_levels(values, self._levels)])

    def unpack(self, words: Words, count: int) -> Values:
        if count <= FEW:
            return self._few.unpack(words, count)
        levels = levels_between(words[:1].view(np.uint16))
        return self.kernels.from_levels(words[1:], count, levels, self.dtype)

    @cached_property
    def _bits(self) -> HalfBits:
        return to_half(np.array(self.ends, np.float64), "bfloat16")

    @cached_property
    def _levels(self) -> NDArray[np.float32]:
        return levels_between(self._bits)

    @property
    def _few(self) -> Halves:
        return Halves(self.dtype, "bfloat16", self.kernels)


def levels_between(ends: HalfBits) -> NDArray[np.float32]:
    """Return the levels, ascending: float32, shape (8,). ends: lowest and largest, bfloat16 as bits, shape (2,).

    If the lowest is 0, the first level is 0, and the others lie within 8 octaves below the largest.
    """
    lowest, largest = ends.tolist()
    known, unknown = _evenly(lowest, largest, LEVELS), _evenly(max(largest - DEPTH, 0), largest, LEVELS - 1)
    return from_half(np.array(known if lowest else [0, *unknown], np.uint16), "bfloat16", np.float32)


def _evenly(first: int, last: int, count: int) -> list[int]:
    return [first + (last - first) * each // (count - 1) for each in range(count)]


def format_of(dtype: Any, value_dtype: ValueDtype | None, ends: Ends, kernels: Kernels) -> ValueFormat:
    """Return the format for these dtypes.

    dtype: of the values in memory. value_dtype: of those on the wire; None: the same. ends: for "log4".
    """
    if value_dtype is None:
        return Plain(dtype)
    return Levels(dtype, ends, kernels) if value_dtype == "log4" else Halves(dtype, value_dtype, kernels)
