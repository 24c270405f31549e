"""The dense side: the elements that algorithms select from; and residual + gradient, which touches all n elements.

Two buffers of n change roles: a step writes residual + gradient into the spare one and commits by
swapping them. So a step that must not count (NaN, overflow) is undone by not committing, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels import CHUNK, KERNELS, CandidateBuffer, Kernels
from ..vectors.runs import Runs
from ..vectors.sparse import Indices, SparseVector, Values, concatenate

LARGEST = (1 << 25) - (1 << 16)
"""Bytes: glibc adapts to freed blocks of up to 32 MiB."""


@cache
def keep_freed_memory() -> None:
    """Make glibc keep up to 64 MiB of freed memory for the next allocation; once in a process.

    glibc gives freed memory back to the system at once, until it has seen a larger block freed (mallopt(3),
    M_MMAP_THRESHOLD). A step allocates and frees some megabytes: each time the system would map them anew, page by
    page. The block that shows glibc the size is never written to, so it costs nothing. Thresholds that were set by
    hand stay.
    """
    np.empty(LARGEST, np.uint8)


CACHE = 1 << 24
"""Bytes of a vector that is assumed not to fit the cache."""
Piece = tuple[int, Any]
"""An offset and a flat array on the accumulator's device."""
Pieces = Sequence[Piece]
"""Pieces that together cover a vector, in ascending order."""
Sum = tuple[int, NDArray[Any], Sequence[Values], Sequence[Values]]
"""An offset; a piece of the gradient; the summands before and after it, in order, of the accumulator's dtype."""


class Accumulator(ABC):
    """A vector of n elements on any device, from which a step selects: the algorithms' view."""

    n: int
    dtype: Any
    expected: float
    """The threshold of the last `expect_threshold`; infinity before the first."""

    @abstractmethod
    def expect_threshold(self, threshold: float, limit: int) -> None:
        """Hint that `select` will ask for about this threshold or more, from the next `accumulate` on.

        Elements that pass, up to limit, may then be collected in the pass that accumulates.
        """

    @abstractmethod
    def select(self, threshold: float, limit: int) -> SparseVector | None:
        """Return the non-zero elements of acc with magnitude >= threshold; None if there are more than limit.

        Valid until the next `accumulate`, which may write into the same memory.
        """

    @abstractmethod
    def sample(self, stride: int) -> Values:
        """Return the magnitudes of every stride-th element of acc, on the host."""

    @abstractmethod
    def elements_at(self, places: Runs) -> Values:
        """Return the elements of acc at these places; on the host."""

    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """Return mean and standard deviation of acc."""

    @abstractmethod
    def values(self) -> Values:
        """Return acc itself, on the host: shape (n,), to be read before the commit."""


class ResidualAccumulator(Accumulator):
    """acc = residual + gradient. One step: accumulate, select, commit."""

    @abstractmethod
    def accumulate(self, pieces: Iterable[tuple[int, Any]], clear: bool = False) -> bool:
        """Set acc = residual + gradient; return True if every element of acc is finite.

        The pieces are (offset, array) pairs that together cover [0, n).
        `clear` leaves zeros in pieces of the accumulator's own dtype, for the update to be written there.
        """

    @abstractmethod
    def commit(self, contributed: Indices | slice, remainder: SparseVector | None = None) -> None:
        """Set residual = acc, but zero at the indices that contributed to the update, plus the remainder."""

    @abstractmethod
    def read_residual(self) -> Values:
        """Return a copy of the residual, on the host."""

    @abstractmethod
    def load_residual(self, values: Values) -> None:
        """Set the residual to these values."""


def between(pieces: Pieces, start: int, stop: int) -> Iterator[Piece]:
    """Yield the parts of pieces that lie in [start, stop), each with its distance from start."""
    for offset, piece in pieces[max(bisect_right(pieces, start, key=itemgetter(0)) - 1, 0):]:
        if offset >= stop:
            return
        low = max(start, offset)
        part = piece[low - offset:stop - offset]
        if len(part):
            yield low - start, part


def converted(piece: NDArray[Any], dtype: Any, clear: bool) -> Iterator[tuple[int, Values]]:
    """Yield (offset, contiguous array of this dtype): the piece itself, if possible; otherwise copies of its chunks.

    If `clear`, a piece of this dtype is to be zero afterwards; the caller clears an array that is the piece itself.
    """
    if piece.dtype == dtype and piece.flags.c_contiguous:
        yield 0, piece
        return
    for start in range(0, len(piece), CHUNK):
        chunk = piece[start:start + CHUNK]
        yield start, np.array(chunk, dtype, order="C")
        if clear and piece.dtype == dtype:
            chunk.fill(0)


class CollectingAccumulator(Accumulator):
    """An Accumulator's `expect_threshold`, `select` and `moments`; see there.

    A derived class gives `_collect` and `_chunks`. The kernels are the loops over the elements, in C++ if built.
    """

    def __init__(self, n: int, dtype: Any = np.float32, kernels: Kernels = KERNELS) -> None:
        keep_freed_memory()
        self.n = n
        self.dtype = np.dtype(dtype)
        self.expected = np.inf
        self._kernels = kernels
        self._candidates = CandidateBuffer(0, self.dtype)
        self._bound: float | None = None  # what the candidates of this acc pass; None: they are of no use

    def expect_threshold(self, threshold: float, limit: int) -> None:
        self.expected, self._bound = threshold, None
        if limit != self._candidates.capacity:
            self._candidates = CandidateBuffer(limit, self.dtype)

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        candidates = self._candidates
        if self._bound is not None and candidates.count <= candidates.capacity and threshold >= self._bound:
            found = _collected(candidates)
            if threshold > self._bound:
                found = found.passing(threshold)
            return found if len(found) <= limit else None
        if self._bound is not None and limit <= candidates.capacity < candidates.count and threshold <= self._bound:
            return None
        return self._select_in_a_pass(threshold, limit)

    def _select_in_a_pass(self, threshold: float, limit: int) -> SparseVector | None:
        if threshold == 0.0:  # as a rule most elements pass: they are written where they stay
            everything = CandidateBuffer(self.n, self.dtype)
            self._collect(0, self.n, threshold, everything)
            return _collected(everything) if everything.count <= limit else None
        buffer, found, count = CandidateBuffer(CHUNK // 2, self.dtype), [], 0
        for start in range(0, self.n, buffer.capacity):
            buffer.count = 0
            self._collect(start, min(start + buffer.capacity, self.n), threshold, buffer)
            count += buffer.count
            if count > limit:
                return None
            found.append(_collected(buffer).copy())
        return concatenate(found, self.dtype)

    @abstractmethod
    def _collect(self, start: int, stop: int, threshold: float, buffer: CandidateBuffer) -> object:
        """Collect the elements of acc[start:stop] with magnitude >= threshold into the buffer."""

    def moments(self) -> tuple[float, float]:
        total = squares = 0.0  # of chunks, which are summed in the dtype itself: enough for an estimate
        with np.errstate(over="ignore"):
            for chunk in self._chunks():
                total += float(chunk.sum())
                squares += float(np.dot(chunk, chunk))
        mean = total / self.n
        return mean, float(np.sqrt(max(0.0, squares / self.n - mean * mean)))  # mean**2 raises where it overflows

    @abstractmethod
    def _chunks(self) -> Iterator[Values]:
        """Return acc in chunks, in order."""


class NumpyAccumulator(CollectingAccumulator, ResidualAccumulator):
    """A ResidualAccumulator in host memory; residual and spare are float32 or float64 arrays of n."""

    def __init__(self, n: int, dtype: Any = np.float32, kernels: Kernels = KERNELS) -> None:
        super().__init__(n, dtype, kernels)
        self.residual = self._allocate()
        self._acc = self._allocate()

    def accumulate(self, pieces: Iterable[tuple[int, NDArray[Any]]], clear: bool = False) -> bool:
        return self._add_sums(((offset, piece, (), ()) for offset, piece in pieces), clear)

    def _add_sums(self, sums: Iterable[Sum], clear: bool) -> bool:
        """Accumulate sums instead of pieces; `clear` clears the piece of each sum."""
        self._candidates.count, self._bound = 0, None
        finite = ascending = True
        done = 0
        for offset, piece, before, after in sums:
            ascending = ascending and offset == done
            done = offset + len(piece)
            for start, gradient in converted(piece, self.dtype, clear):
                first, part = offset + start, slice(start, start + len(gradient))
                own = slice(first, first + len(gradient))
                finite = self._kernels.add_and_collect(
                    self.residual[own], gradient, self._acc[own], 1.0, self.expected, first, self._candidates,
                    self._acc.nbytes > CACHE, clear, [other[part] for other in before],
                    [other[part] for other in after]) and finite
        if ascending:
            self._bound = self.expected
        return finite

    def _collect(self, start: int, stop: int, threshold: float, buffer: CandidateBuffer) -> None:
        self._kernels.collect(self._acc[start:stop], threshold, start, buffer)

    def sample(self, stride: int) -> Values:
        magnitudes: Values = np.abs(self._acc[::stride])
        return magnitudes

    def elements_at(self, places: Runs) -> Values:
        return self._acc[places.indices]

    def _chunks(self) -> Iterator[Values]:
        return (self._acc[start:start + CHUNK] for start in range(0, self.n, CHUNK))

    def values(self) -> Values:
        return self._acc

    def commit(self, contributed: Indices | slice, remainder: SparseVector | None = None) -> None:
        if isinstance(contributed, slice):
            self._acc[contributed] = 0
        else:
            self._kernels.clear(self._acc, contributed)
        if remainder is not None:
            self._kernels.add(self._acc, remainder.indices, remainder.values)
        self.residual, self._acc = self._acc, self.residual

    def read_residual(self) -> Values:
        return self.residual.copy()

    def load_residual(self, values: Values) -> None:
        self.residual[:] = values

    def _allocate(self) -> NDArray[Any]:
        """Return a buffer of n zeros; NumPy asks for huge pages for np.full, and not for np.zeros."""
        return np.full(self.n, 0, self.dtype)


class EmptyAccumulator(Accumulator):
    """The accumulator of a rank that contributes nothing to a reduction in which it takes part."""

    expected = np.inf

    def __init__(self, n: int, dtype: Any = np.float32) -> None:
        self.n, self.dtype = n, np.dtype(dtype)

    def expect_threshold(self, threshold: float, limit: int) -> None:
        """Do nothing: no threshold finds anything."""

    def select(self, threshold: float, limit: int) -> SparseVector:  # noqa: ARG002
        return SparseVector.empty(self.dtype)

    def sample(self, stride: int) -> Values:  # noqa: ARG002
        return np.empty(0, self.dtype)

    def elements_at(self, places: Runs) -> Values:
        return np.zeros(len(places), self.dtype)

    def moments(self) -> tuple[float, float]:
        return 0.0, 0.0

    def values(self) -> Values:
        return np.zeros(self.n, self.dtype)


def _collected(buffer: CandidateBuffer) -> SparseVector:
    return SparseVector(buffer.indices[:buffer.count], buffer.values[:buffer.count])
