"""A sparse vector as bytes, and back: its values, and then its indices.

The receiver of a message knows how many elements it holds and which region they lie in, and therefore its length:
no length is ever sent. Values are unchanged, in 16 bits, or in 4.

Indices are in Elias-Fano code (Elias, 1974; Fano, 1971), which takes about
2 + log2(span / count) bits for each, whatever their distribution: 8.6 at density 1 % where COO takes 32. If
a few elements lie in a wide region, plain uint32 are shorter; if more than a quarter of a region are there, so is a
bit for each of the region's; and if all are there, nothing is sent but the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import WireError
from ..kernels import KERNELS, LEVELS, HalfBits, Kernels, Words
from ..transport.base import WORD, Bytes
from .sparse import RunVector, SparseVector, Values

ValueDtype = Literal["bfloat16", "log4"]
Format = ValueDtype | Literal["log4 blocks"]
"""The formats of values on the wire, other than unchanged; users choose among those of ValueDtype."""
Ends = tuple[float, float]
"""The (lowest, largest) magnitude that is sent. 0 as the lowest: it is not known."""

WORD_BITS = 8 * WORD
DEPTH = 8 << 7
"""Span of the levels, except zero, if the lowest is not known: 8 octaves, of 2**7 bfloat16 numbers each."""
BLOCK = 64
"""Number of values that share one scale in the format "log4 blocks"."""
SENT_AS_HALVES = 2
"""Number of values up to which bfloat16 takes fewer words than the ends and 4 bits for each."""


@dataclass(frozen=True)
class Plain:
    """A format of values on the wire, here as they are in memory; the other formats derive from it.

    Values in memory are of the dtype, float32 or float64; they are finite, of shape (m,). See WireCodec for `ends`.
    """

    dtype: Any
    kernels: Kernels
    ends: Ends

    def words(self, count: int) -> int:
        """Return how many words of 4 bytes the values of a message with `count` elements take."""
        return count * np.dtype(self.dtype).itemsize // WORD

    def round(self, values: Values) -> Values:
        """Return the values that arrive, however they are divided into messages (but see BlockLevels)."""
        return values

    def pack(self, values: Values) -> Words:
        """Write values that `round` leaves as they are: uint32, shape (words(m),)."""
        return np.ascontiguousarray(values).view(np.uint32)

    def unpack(self, words: Words, count: int) -> Values:  # noqa: ARG002
        return words.view(self.dtype)


class Halves(Plain):
    """Values in bfloat16."""

    def words(self, count: int) -> int:
        return -(-count // 2)

    def round(self, values: Values) -> Values:
        return self.kernels.from_half(self.kernels.to_half(values), self.dtype)

    def pack(self, values: Values) -> Words:
        halves = self.kernels.to_half(values)
        return np.append(halves, np.zeros(len(halves) % 2, np.uint16)).view(np.uint32)

    def unpack(self, words: Words, count: int) -> Values:
        return self.kernels.from_half(words.view(np.uint16)[:count], self.dtype)


class Levels(Halves):
    """Values in 4 bits. A message has a word with the ends, and then the codes; or a few levels as halves."""

    def words(self, count: int) -> int:
        return super().words(count) if count <= SENT_AS_HALVES else 1 + -(-count // 8)

    def round(self, values: Values) -> Values:
        codes = self.kernels.to_levels(values, self._levels)
        return self.kernels.from_levels(codes, len(values), self._levels, self.dtype)

    def pack(self, values: Values) -> Words:
        if len(values) <= SENT_AS_HALVES:
            return super().pack(values)
        return np.concatenate([self._bits.view(np.uint32), self.kernels.to_levels(values, self._levels)])

    def unpack(self, words: Words, count: int) -> Values:
        if count <= SENT_AS_HALVES:
            return super().unpack(words, count)
        levels = levels_between(words[:1].view(np.uint16))
        return self.kernels.from_levels(words[1:], count, levels, self.dtype)

    @cached_property
    def _bits(self) -> HalfBits:
        return self.kernels.to_half(np.array(self.ends))

    @cached_property
    def _levels(self) -> NDArray[np.float32]:
        return levels_between(self._bits)


class BlockLevels(Plain):
    """Values in 4 bits, as fractions of the largest magnitude of their block, which travels in 16 bits.

    Blocks of BLOCK values are counted from the beginning of a message. So a vector that is rounded whole, and sent in
    several messages, has to be divided at blocks' borders. `ends` are not used.
    """

    def words(self, count: int) -> int:
        return -(-blocks_of(count) // 2) + -(-count // 8)

    def round(self, values: Values) -> Values:
        codes, scales = self.kernels.to_blocks(values, FRACTIONS, BLOCK)
        return self._values(codes, scales, len(values))

    def pack(self, values: Values) -> Words:
        codes, scales = self.kernels.to_blocks(values, FRACTIONS, BLOCK)
        return np.concatenate([np.append(scales, np.zeros(len(scales) % 2, np.uint16)).view(np.uint32), codes])

    def unpack(self, words: Words, count: int) -> Values:
        scales = words.view(np.uint16)[:blocks_of(count)]
        return self._values(words[-(-len(scales) // 2):], scales, count)

    def _values(self, codes: Words, scales: HalfBits, count: int) -> Values:
        values: Values = self.kernels.from_blocks(codes, scales, count, FRACTIONS, BLOCK, self.dtype)
        return values


FORMATS: dict[Format | None, type[Plain]] = {None: Plain, "bfloat16": Halves, "log4": Levels,
                                             "log4 blocks": BlockLevels}


def blocks_of(count: int) -> int:
    """Return the number of blocks of so many elements."""
    return -(-count // BLOCK)


def levels_between(ends: HalfBits) -> NDArray[np.float32]:
    """Return the levels, ascending: float32, shape (8,). The ends, lowest and largest, are bfloat16 bits, shape (2,).

    If the lowest end is 0, the first level is 0, and the others lie within 8 octaves below the largest.
    """
    lowest, largest = ends.astype(np.int64)
    first, count = (lowest, LEVELS) if lowest else (max(largest - DEPTH, 0), LEVELS - 1)
    levels = first + (largest - first) * np.arange(count) // (count - 1)
    return KERNELS.from_half(np.append(np.zeros(LEVELS - count), levels).astype(np.uint16), np.float32)


FRACTIONS = levels_between(KERNELS.to_half(np.array([0.0, 1.0])))
"""The levels of a block, as fractions of its largest magnitude."""


class Extent(NamedTuple):
    """The number of a message's elements and the range [start, stop) of their indices: both ends know them."""

    length: int
    start: int
    stop: int


@dataclass(frozen=True)
class WireCodec:
    """The format of sparse vectors of one dtype, the same on all ranks.

    The values have `dtype` in memory, float32 or float64, and `value_dtype` on the wire; None means the same.
    The ends, for "log4", are of the magnitudes that are written. A message holds them: its reader need not know them.
    """

    dtype: Any
    value_dtype: Format | None = None
    kernels: Kernels = KERNELS
    ends: Ends = (0.0, 0.0)

    def for_magnitudes(self, lowest: float, largest: float) -> WireCodec:
        """Return the codec that writes magnitudes in [lowest, largest]; 0 as the lowest: it is not known.

        If the largest is infinite, as a sum has overflowed, values are written unchanged, so that all ranks see it.
        """
        return replace(self, ends=(lowest, largest), value_dtype=self.value_dtype if isfinite(largest) else None)

    def round(self, vector: SparseVector) -> SparseVector:
        """Return the vector with the values that arrive; the same vector if values are sent unchanged."""
        if self.value_dtype is None:
            return vector
        return vector.with_values(self._values.round(vector.values))

    def size(self, count: int, span: int) -> int:
        """Return the bytes of a message of `count` elements within `span` indices."""
        _, low_words, upper_words = _index_words(count, span)
        return WORD * (self._values.words(count) + low_words + upper_words)

    def message_sizes(self, extents: Iterable[Extent]) -> list[int]:
        """Return the bytes of a message of each extent."""
        return [self.size(length, stop - start) for length, start, stop in extents]

    def encode(self, vector: SparseVector, start: int, stop: int) -> Bytes:
        """Return the message for a vector with indices in [start, stop): uint8, shape (size(m, stop - start),)."""
        values = vector.values
        low_bits, low_words, upper_words = _index_words(len(values), stop - start)
        words: Words = self._values.pack(values)
        if low_words or upper_words:
            indices = ((vector.indices - start).astype(np.uint32) if not upper_words  # plain ones
                       else self.kernels.pack_indices(vector.indices, start, low_bits, low_words, upper_words))
            words = np.concatenate([words, indices])
        return words.view(np.uint8)

    def decode(self, message: Bytes, count: int, start: int, stop: int) -> SparseVector:
        """Return the vector of `count` elements in a message. All its indices must lie in [start, stop).

        Raise WireError if the length does not fit, or an index is out of order or out of the region.
        """
        low_bits, low_words, upper_words = _index_words(count, stop - start)
        split = WORD * self._values.words(count)
        expected = split + WORD * (low_words + upper_words)
        if len(message) != expected:
            raise WireError(f"a message of {count} elements within [{start}, {stop}) has {expected} bytes; "
                            f"this one has {len(message)}")
        values, words = message[:split].copy().view(np.uint32), message[split:].copy().view(np.uint32)  # aligned
        if count == stop - start:
            return RunVector.between(start, self._values.unpack(values, count))
        indices = (_plain_indices(words, start, stop) if not upper_words
                   else self.kernels.unpack_indices(words, count, start, stop, low_bits, low_words))
        if len(indices) != count:
            raise WireError(f"a message's {count} indices should ascend within [{start}, {stop}), and do not")
        return SparseVector(indices, self._values.unpack(values, count))

    def encode_each(self, vectors: Mapping[int, SparseVector], extents: Mapping[int, Extent]) -> dict[int, Bytes]:
        """Return the message for each rank that an extent is of."""
        return {rank: self.encode(vectors[rank], start, stop) for rank, (_, start, stop) in extents.items()}

    def decode_each(self, messages: Iterable[tuple[int, Bytes]], extents: Mapping[int, Extent],
                    ) -> dict[int, SparseVector]:
        """Return the vectors in (rank, message) pairs, by rank. Raise WireError as `decode`."""
        return {rank: self.decode(message, *extents[rank]) for rank, message in messages}

    @cached_property
    def _values(self) -> Plain:
        return FORMATS[self.value_dtype](self.dtype, self.kernels, self.ends)


@lru_cache(maxsize=1024)  # both ends ask several times for each message
def _index_words(count: int, span: int) -> tuple[int, int, int]:
    """Return (lower bits of each index, words that hold them, words that hold the upper parts): the shortest code.

    0 lower bits are a bit for each of the span, or no words if all are there; 32, and no upper parts, plain indices.
    """
    if count == span:
        return 0, 0, 0
    low_bits = max((span // max(count, 1)).bit_length() - 1, 0)
    low_words = -(-count * low_bits // WORD_BITS)
    upper_words = -(-(count + (max(span, 1) - 1 >> low_bits)) // WORD_BITS)
    bitmap = 0, 0, -(-span // WORD_BITS)
    return min(bitmap, (WORD_BITS, count, 0), (low_bits, low_words, upper_words), key=lambda code: sum(code[1:]))


def _plain_indices(words: NDArray[np.uint32], start: int, stop: int) -> NDArray[np.int64]:
    indices = words.astype(np.int64) + start
    valid = not len(indices) or (indices[-1] < stop and (np.diff(indices) > 0).all())
    return indices if valid else np.empty(0, np.int64)
