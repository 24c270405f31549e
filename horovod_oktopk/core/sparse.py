"""Sparse vectors in coordinate (COO) form: the data that travels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Values = NDArray[Any]


@dataclass(frozen=True)
class SparseVector:
    """A vector of length n, of which only the non-zero elements are kept.

    indices: int64, shape (m,), strictly ascending, each in [0, n).
    values: float32 or float64, shape (m,), in the unit of the gradient.
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

    def compress(self, keep: NDArray[np.bool_]) -> SparseVector:
        """The elements where `keep` (bool, shape (m,)) is true."""
        return SparseVector(self.indices[keep], self.values[keep])

    def split(self, boundaries: Indices) -> list[SparseVector]:
        """One part for each region; boundaries: int64, shape (P + 1,), offsets from 0 to n."""
        cuts = np.searchsorted(self.indices, boundaries)
        return [self[start:stop] for start, stop in itertools.pairwise(cuts)]

    def positions_in(self, other: SparseVector) -> Indices:
        """Positions, in this vector, of the elements whose index `other` holds too (ascending)."""
        if not len(other):
            return np.empty(0, np.int64)
        at = np.searchsorted(other.indices, self.indices)
        at[at == len(other)] = 0
        return np.flatnonzero(other.indices[at] == self.indices)


def concatenate(parts: Sequence[SparseVector], dtype: Any) -> SparseVector:
    """One vector of parts whose index ranges ascend and do not overlap."""
    if not parts:
        return SparseVector.empty(dtype)
    return SparseVector(np.concatenate([part.indices for part in parts]),
                        np.concatenate([part.values for part in parts]))


class SparseSum:
    """Sums sparse vectors of several ranks, each element in rank order whatever the order of arrival.

    `add` merges the indices at once, so that this work overlaps the transfer of the messages still
    under way; `result` adds the values in rank order, so that the sum of an element has the same bits
    whoever owns it and whenever its parts arrived.
    """

    def __init__(self, dtype: Any) -> None:
        self._parts: dict[int, SparseVector] = {}
        self._union: Indices = np.empty(0, np.int64)
        self._dtype = dtype

    def add(self, rank: int, part: SparseVector) -> None:
        """Takes the part of one rank; a rank adds at most one."""
        self._parts[rank] = part
        if len(part):
            self._union = np.union1d(self._union, part.indices) if len(self._union) else part.indices

    def result(self) -> SparseVector:
        """The sum of all the parts. Elements that cancel to exactly zero stay, with value zero."""
        values = np.zeros(len(self._union), self._dtype)
        for rank in sorted(self._parts):
            part = self._parts[rank]
            values[np.searchsorted(self._union, part.indices)] += part.values
        return SparseVector(self._union, values)
