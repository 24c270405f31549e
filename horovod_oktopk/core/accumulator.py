"""The dense side: residual + gradient, and the only code that touches all n elements.

Two buffers of n change roles: a step writes residual + gradient into the spare one and commits by
swapping them. So a step that must not count (NaN, overflow) is undone by not committing, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .sparse import Indices, SparseVector, Values

CHUNK = 1 << 16
"""Elements handled at a time: small enough that temporaries stay in the second-level cache."""


class Accumulator(Protocol):
    """acc = residual + gradient, on whatever device holds it. One step: accumulate, select, commit."""

    n: int
    dtype: Any

    def accumulate(self, pieces: Iterable[tuple[int, Any]], scale: float = 1.0) -> bool:
        """acc = scale * residual + gradient; says whether every element of acc is finite.

        pieces: (offset, array) pairs that together cover [0, n), in the gradient's unit.
        scale: converts the residual where the gradient's unit has changed (loss scaling).
        """

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        """Non-zero elements of acc with magnitude >= threshold; None where there are more than limit."""

    def sample(self, stride: int) -> Values:
        """Magnitudes of every stride-th element of acc, on the host."""

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of acc."""

    def commit(self, contributed: Indices) -> None:
        """The residual becomes acc, with zero at the indices that contributed to the update."""

    def read_residual(self) -> Values:
        """A copy of the residual, on the host."""

    def load_residual(self, values: Values) -> None:
        """The residual takes these values."""


class NumpyAccumulator:
    """An Accumulator in host memory; residual and spare are float32 or float64 arrays of n."""

    def __init__(self, n: int, dtype: Any = np.float32) -> None:
        self.n = n
        self.dtype = np.dtype(dtype)
        self.residual = self._allocate()
        self._acc = self._allocate()
        self._magnitude: NDArray[Any] = np.empty(min(n, CHUNK), self.dtype)
        self._passes: NDArray[np.bool_] = np.empty(min(n, CHUNK), np.bool_)

    def accumulate(self, pieces: Iterable[tuple[int, NDArray[Any]]], scale: float = 1.0) -> bool:
        finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for offset, piece in pieces:
                for start, stop in _chunks(len(piece)):
                    out = self._acc[offset + start:offset + stop]
                    residual = self.residual[offset + start:offset + stop]
                    if scale != 1.0:
                        residual = np.multiply(residual, scale, out=self._magnitude[:stop - start],
                                               dtype=self.dtype)
                    np.add(residual, piece[start:stop], out=out)
                    # A sum is finite only if its terms are; it may overflow though they are.
                    finite = finite and bool(np.isfinite(out.sum()) or np.isfinite(out).all())
        return finite

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        compare = np.greater_equal if threshold > 0 else np.greater
        found: list[NDArray[np.int64]] = []
        count = 0
        for start, stop in _chunks(self.n):
            magnitude = np.abs(self._acc[start:stop], out=self._magnitude[:stop - start])
            passes = compare(magnitude, self.dtype.type(threshold), out=self._passes[:stop - start])
            found.append(np.flatnonzero(passes) + start)
            count += len(found[-1])
            if count > limit:
                return None
        indices = np.concatenate(found) if found else np.empty(0, np.int64)
        return SparseVector(indices, self._acc[indices])

    def sample(self, stride: int) -> Values:
        magnitudes: Values = np.abs(self._acc[::stride])
        return magnitudes

    def moments(self) -> tuple[float, float]:
        total = squares = 0.0
        for start, stop in _chunks(self.n):
            chunk = self._acc[start:stop]
            total += float(chunk.sum(dtype=np.float64))
            squares += float(np.einsum("i,i", chunk, chunk, dtype=np.float64))
        mean = total / self.n
        return mean, float(np.sqrt(max(0.0, squares / self.n - mean**2)))

    def commit(self, contributed: Indices) -> None:
        self._acc[contributed] = 0
        self.residual, self._acc = self._acc, self.residual

    def read_residual(self) -> Values:
        return self.residual.copy()

    def load_residual(self, values: Values) -> None:
        self.residual[:] = values

    def _allocate(self) -> NDArray[Any]:
        """A buffer of n zeros."""
        return np.zeros(self.n, self.dtype)


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, CHUNK):
        yield start, min(start + CHUNK, length)
