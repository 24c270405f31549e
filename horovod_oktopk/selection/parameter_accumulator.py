"""Step-ahead error feedback: acc = w - p, which is stored nowhere.

w are the parameters that all ranks share, p this rank's own, in the model. A pass over acc reads two words for each
element and writes none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels import CHUNK, KERNELS, CandidateBuffer, Kernels
from ..vectors.runs import Runs
from ..vectors.sparse import SparseVector, Values
from .accumulator import Accumulator, CollectingAccumulator, Pieces, between


class ParameterAccumulator(Accumulator):
    """acc = w - p. One step: accumulate, select, release, and later commit. Nothing may change p before `release`."""

    shared: Any
    """w: a flat array of n on the accumulator's device; the same bits on all ranks."""
    _pieces: Pieces = ()

    def start(self, pieces: Pieces) -> None:
        """Set w to p."""
        for offset, piece in pieces:
            self.shared[offset:offset + len(piece)] = piece

    @abstractmethod
    def accumulate(self, pieces: Pieces) -> bool:
        """Read acc = w - p; return True if all of it is finite."""

    def release(self) -> None:
        """Release the pieces: a framework may copy a piece that is still held when it writes there."""
        self._pieces = ()

    @abstractmethod
    def commit(self, update: SparseVector) -> None:
        """Set w to w - update."""

    @abstractmethod
    def read_shared(self) -> Values:
        """Return w on the host; not to be changed."""

    @abstractmethod
    def minus(self, values: Values) -> Any:
        """Return w - values on the accumulator's device, in memory of its own. The values are on the host."""

    @abstractmethod
    def part(self, start: int, stop: int) -> ParameterAccumulator:
        """Return an accumulator of w[start:stop], in the same memory; it takes pieces from `between`."""


class NumpyParameterAccumulator(CollectingAccumulator, ParameterAccumulator):
    """A ParameterAccumulator in host memory, of float32 or float64 as the pieces are."""

    def __init__(self, n: int, dtype: Any = np.float32, kernels: Kernels = KERNELS,
                 shared: NDArray[Any] | None = None) -> None:
        super().__init__(n, dtype, kernels)
        self.shared: NDArray[Any] = np.empty(n, self.dtype) if shared is None else shared

    def accumulate(self, pieces: Pieces) -> bool:
        self._pieces = pieces
        self._candidates.count, self._bound = 0, self.expected
        return self._collect(0, self.n, self.expected, self._candidates)

    def _collect(self, start: int, stop: int, threshold: float, buffer: CandidateBuffer) -> bool:
        finite = True
        for distance, part in between(self._pieces, start, stop):
            offset = start + distance
            shared, own = self.shared[offset:offset + len(part)], np.ascontiguousarray(part)
            finite = self._kernels.subtract_and_collect(shared, own, threshold, offset, buffer) and finite
        return finite

    def _chunks(self) -> Iterator[NDArray[Any]]:
        for offset, piece in self._pieces:
            for at in range(0, len(piece), CHUNK):
                part = piece[at:at + CHUNK]
                yield self.shared[offset + at:offset + at + len(part)] - part

    def sample(self, stride: int) -> Values:
        parts = [np.empty(0, self.dtype)]
        for offset, piece in self._pieces:
            first = -offset % stride
            parts.append(np.abs(self.shared[offset + first:offset + len(piece):stride] - piece[first::stride]))
        return np.concatenate(parts)

    def elements_at(self, places: Runs) -> Values:
        elements = np.empty(len(places), self.dtype)
        for offset, piece in self._pieces:
            first, last = places.numbers_below(np.array([offset, offset + len(piece)])).tolist()
            own = places[first:last]
            self._kernels.subtract_runs(self.shared[offset:offset + len(piece)], np.ascontiguousarray(piece),
                                        own.starts, own.offsets, offset, elements[first:last])
        return elements

    def values(self) -> Values:
        return np.concatenate([np.empty(0, self.dtype), *self._chunks()])

    def commit(self, update: SparseVector) -> None:
        if len(update) == self.n:
            self.shared -= update.values
        else:
            update.with_values(-update.values).add_to(self.shared, kernels=self._kernels)

    def read_shared(self) -> Values:
        return self.shared

    def minus(self, values: Values) -> NDArray[Any]:
        return self.shared - values

    def part(self, start: int, stop: int) -> NumpyParameterAccumulator:
        return NumpyParameterAccumulator(stop - start, self.dtype, self._kernels, self.shared[start:stop])
