"""The flat vector of all gradients, and sparse vectors in coordinate (COO) form: the data that travels."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..kernels import KERNELS

Indices = NDArray[np.int64]
Values = NDArray[Any]
Bits = NDArray[Any]
"""Magnitudes as unsigned integers of the same size, in the same order."""
DTYPES = ("float16", "bfloat16", "float32", "float64")
OVERFLOWS = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": np.inf}
"""The least float32 magnitudes that become infinite in these dtypes."""
MAX_ELEMENTS = 2**32
"""Limit on the elements of a vector: on the wire a word could not tell more of them apart."""


@dataclass(frozen=True)
class SparseVector:
    """A vector of length n, of which only the non-zero elements are kept.

    The indices are int64, shape (m,), strictly ascending, each in [0, n).
    The values are float32 or float64, shape (m,), in the unit of the gradient.
    """

    indices: Indices
    values: Values

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, part: slice) -> SparseVector:
        return SparseVector(self.indices[part], self.values[part])

    @staticmethod
    def empty(dtype: Any) -> SparseVector:
        return SparseVector(np.empty(0, np.int64), np.empty(0, dtype))

    def copy(self) -> SparseVector:
        return SparseVector(self.indices.copy(), self.values.copy())

    def take(self, positions: Indices) -> SparseVector:
        """Return the elements at these positions (ascending)."""
        return SparseVector(self.indices[positions], self.values[positions])

    def compress(self, keep: NDArray[np.bool_]) -> SparseVector:
        """Return the elements for which `keep` (bool, shape (m,)) is true; this vector itself if all are."""
        positions = np.flatnonzero(keep)  # faster than indexing by a mask
        return self if len(positions) == len(self) else self.take(positions)

    def without(self, positions: Indices) -> SparseVector:
        """Return the elements except those at these positions; this vector itself if there are none."""
        if not len(positions):
            return self
        keep = np.ones(len(self), np.bool_)  # np.delete takes three times as long
        keep[positions] = False
        return self.compress(keep)

    def divided(self, by: float) -> SparseVector:
        """Return the vector divided by a number, in its own dtype."""
        return SparseVector(self.indices, self.values / self.values.dtype.type(by))

    def passing(self, threshold: float) -> SparseVector:
        """Return the non-zero elements with magnitude >= threshold, in memory of their own."""
        return SparseVector(*KERNELS.passing(self.indices, self.values, threshold))

    def minus(self, other: SparseVector) -> SparseVector:
        """Return the difference to a vector with the same indices."""
        return SparseVector(self.indices, self.values - other.values)

    def positions_in(self, other: SparseVector) -> Indices:
        """Return the positions, in this vector, of the elements whose index `other` holds too (ascending)."""
        return KERNELS.common_positions(self.indices, other.indices)


@dataclass(frozen=True)
class DenseVector:
    """All n elements of a vector, for a dense step. The values are float32 or float64, shape (n,)."""

    values: Values

    def __len__(self) -> int:
        return len(self.values)

    def divided(self, by: float) -> DenseVector:
        return DenseVector(self.values / self.values.dtype.type(by))


def concatenate(parts: Sequence[SparseVector], dtype: Any) -> SparseVector:
    """Join parts whose index ranges ascend and do not overlap into one vector."""
    if not parts:
        return SparseVector.empty(dtype)
    return SparseVector(np.concatenate([part.indices for part in parts]),
                        np.concatenate([part.values for part in parts]))


def sum_of(parts: Sequence[SparseVector]) -> SparseVector:
    """Return the sum of one or more vectors, each element added up in their order: the same bits on every rank.

    Elements that cancel to exactly zero stay, with value zero.
    """
    return SparseVector(*KERNELS.sum_parts([part.indices for part in parts], [part.values for part in parts]))


def to_bits(values: Values) -> Bits:
    return np.abs(values).view(f"u{values.dtype.itemsize}")


def from_bits(bits: int, dtype: Any) -> float:
    return float(np.array([bits], f"u{np.dtype(dtype).itemsize}").view(dtype)[0])


class Layout:
    """The flat view over gradients, in the given order.

    The entries are the name, shape and dtype's name of each. There are n elements in all. The offsets are int64,
    shape (number of gradients + 1,). The dtype is the residual's: float64 if any gradient is, float32 otherwise.
    Raise OptionError for a dtype other than DTYPES, and for too many elements.
    """

    def __init__(self, entries: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
        self.entries = tuple(entries)
        lengths = [int(np.prod(shape, dtype=np.int64)) for _, shape, _ in self.entries]
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.n = int(self.offsets[-1])
        self.dtype = np.dtype(np.float64 if any(dtype == "float64" for _, _, dtype in self.entries) else np.float32)
        for name, _, dtype in self.entries:
            if dtype not in DTYPES:
                raise OptionError(f"the gradient of '{name}' must be one of {DTYPES}; got {dtype}")
        if self.n >= MAX_ELEMENTS:
            raise OptionError(f"at most {MAX_ELEMENTS - 1} gradient elements can be reduced at once; got {self.n}: "
                              "divide the parameters among several optimizers")

    def describe(self) -> list[str]:
        """Return one line for each gradient, which must be equal on all ranks."""
        return [f"parameter {name}: shape {shape}, {dtype}" for name, shape, dtype in self.entries]

    def describe_memory(self) -> list[str]:
        """Return one line for each parameter, as `describe`, with the order in which its elements lie in memory."""
        return self.describe()

    def representable(self, update: SparseVector | DenseVector) -> bool:
        """Return True if every value is finite in the dtype of its gradient; float16 overflows early."""
        if not np.isfinite(update.values).all():
            return False
        own, dtypes = self.dtype.name, [dtype for *_, dtype in self.entries]
        if {*dtypes} <= {own}:
            return True
        with np.errstate(over="ignore"):
            return all((np.abs(part.values.astype(np.float32)) < OVERFLOWS[dtype]).all()
                       for part, dtype in zip(self.parts(update), dtypes, strict=True) if dtype != own)

    def parts(self, update: SparseVector | DenseVector) -> Iterator[SparseVector]:
        """Yield the update's part of each gradient; indices from the gradient's own start."""
        indices = None if isinstance(update, DenseVector) else update.indices
        cuts = self.offsets if indices is None else np.searchsorted(indices, self.offsets)
        for offset, (start, stop) in zip(self.offsets, itertools.pairwise(cuts), strict=False):
            own = np.arange(stop - start) if indices is None else indices[start:stop] - offset
            yield SparseVector(own, update.values[start:stop])


def scatter(out: NDArray[Any], part: SparseVector, zero: bool = False) -> None:
    """Write a gradient's part of the update over the gradient, flat and contiguous, in its dtype.

    `zero` tells that the gradient is zero already, if its dtype is the update's.
    """
    if out.dtype == part.values.dtype:
        KERNELS.scatter(out, part.indices, part.values, zero)
    else:
        out.fill(0)
        out[part.indices] = part.values
