"""Sparse vectors in coordinate (COO) form: the data that travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels import KERNELS, Kernels
from .runs import Runs

Indices = NDArray[np.int64]
Values = NDArray[Any]
Bits = NDArray[Any]
"""Magnitudes as unsigned integers of the same size, in the same order."""


@dataclass(frozen=True)
class SparseVector:
    """A vector of length n, of which only the non-zero elements are kept.

    The indices are int64, shape (m,), strictly ascending, each in [0, n).
    The values are float32 or float64, shape (m,), in the unit of the gradient.
    """

    indices: Indices
    values: Values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> SparseVector:
        return SparseVector(self.indices[part], self.values[part])

    def split(self, lengths: Sequence[int]) -> list[SparseVector]:
        """Return consecutive parts of these lengths."""
        return [self[start:stop] for start, stop in pairwise(np.cumsum([0, *lengths]).tolist())]

    def with_values(self, values: Values) -> SparseVector:
        """Return a vector with the same indices, and these values."""
        return SparseVector(self.indices, values)

    def shifted(self, by: int) -> SparseVector:
        """Return the vector whose indices are larger by this number."""
        return SparseVector(self.indices + by, self.values)

    def numbers_below(self, bounds: Indices) -> Indices:
        """Return how many elements have an index below each bound."""
        numbers: Indices = np.searchsorted(self.indices, bounds)
        return numbers

    def add_to(self, out: NDArray[Any], first: int = 0, kernels: Kernels = KERNELS) -> None:
        """Add the vector, in place, to an array whose first element has the index `first`."""
        kernels.add(out, self.indices - first if first else self.indices, self.values)

    @property
    def is_consecutive(self) -> bool:
        """True if there are elements, and none between them is left out."""
        return len(self) > 0 and int(self.indices[-1] - self.indices[0]) == len(self) - 1

    @staticmethod
    def empty(dtype: Any) -> SparseVector:
        return SparseVector(np.empty(0, np.int64), np.empty(0, dtype))

    def copy(self) -> SparseVector:
        return SparseVector(self.indices.copy(), self.values.copy())

    def take(self, positions: Indices) -> SparseVector:
        """Return the elements at these positions (ascending); this vector itself if they are all."""
        if len(positions) == len(self):
            return self
        return SparseVector(self.indices[positions], self.values[positions])

    def compress(self, keep: NDArray[np.bool_]) -> SparseVector:
        """Return the elements for which `keep` (bool, shape (m,)) is true; this vector itself if all are."""
        return self.take(np.flatnonzero(keep))  # faster than indexing by a mask

    def without(self, positions: Indices) -> SparseVector:
        """Return the elements except those at these positions; this vector itself if there are none."""
        if not len(positions):
            return self
        keep = np.ones(len(self), np.bool_)  # np.delete takes three times as long
        keep[positions] = False
        return self.compress(keep)

    def divided(self, by: float) -> SparseVector:
        """Return the vector divided by a number, in its own dtype."""
        return self.with_values(self.values / self.values.dtype.type(by))

    def passing(self, threshold: float) -> SparseVector:
        """Return the non-zero elements with magnitude >= threshold, in memory of their own."""
        return SparseVector(*KERNELS.passing(self.indices, self.values, threshold))

    def positions_in(self, other: SparseVector) -> Indices:
        """Return the positions, in this vector, of the elements whose index `other` holds too (ascending)."""
        return KERNELS.common_positions(self.indices, other.indices)


class RunVector(SparseVector):
    """A sparse vector whose elements lie in runs: it holds no index of each."""

    runs: Runs

    def __init__(self, runs: Runs, values: Values) -> None:
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "values", values)

    @staticmethod
    def between(start: int, values: Values) -> RunVector:
        """Return a vector without gaps, whose first element has the index `start`."""
        return RunVector(Runs(np.array([start]), np.array([0, len(values)])), values)

    @property
    def indices(self) -> Indices:  # type: ignore[override]
        return self.runs.indices

    def __getitem__(self, part: slice) -> RunVector:
        return RunVector(self.runs[part], self.values[part])

    def with_values(self, values: Values) -> RunVector:
        return RunVector(self.runs, values)

    def shifted(self, by: int) -> RunVector:
        return RunVector(self.runs.shifted(by), self.values)

    def numbers_below(self, bounds: Indices) -> Indices:
        return self.runs.numbers_below(bounds)

    def add_to(self, out: NDArray[Any], first: int = 0, kernels: Kernels = KERNELS) -> None:
        kernels.add_runs(out, self.runs.starts, self.runs.offsets, self.values, first)


def concatenate(parts: Sequence[SparseVector], dtype: Any) -> SparseVector:
    """Join parts whose index ranges ascend and do not overlap into one vector."""
    if not parts:
        return SparseVector.empty(dtype)
    values, runs = np.concatenate([part.values for part in parts]), _runs_of(parts)
    if runs:
        return RunVector(Runs.joined(runs), values)
    return SparseVector(np.concatenate([part.indices for part in parts]), values)


def sum_of(parts: Sequence[SparseVector]) -> SparseVector:
    """Return the sum of one or more vectors, each element added up in their order: the same bits on every rank.

    Elements that cancel to exactly zero stay, with value zero.
    """
    runs = _runs_of(parts)
    if runs and all(each.equals(runs[0]) for each in runs):
        total = np.zeros(len(runs[0]), parts[0].values.dtype)
        for part in parts:
            if len(part):
                total += part.values
        return RunVector(runs[0], total)
    return SparseVector(*KERNELS.sum_parts([part.indices for part in parts], [part.values for part in parts]))


def _runs_of(parts: Sequence[SparseVector]) -> list[Runs]:
    """Return the runs of the parts that have elements, if all of these are in runs; otherwise none."""
    held = [part for part in parts if len(part)]
    runs = [part.runs for part in held if isinstance(part, RunVector)]
    return runs if len(runs) == len(held) else []


def to_bits(values: Values) -> Bits:
    return np.abs(values).view(f"u{values.dtype.itemsize}")


def from_bits(bits: int, dtype: Any) -> float:
    return float(np.array([bits], f"u{np.dtype(dtype).itemsize}").view(dtype)[0])
