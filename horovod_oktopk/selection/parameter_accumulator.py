"""Step-ahead error feedback: acc = w - p, which is stored nowhere.

w are the parameters that all ranks share, p this rank's own, in the model. A ParameterAccumulator keeps w, and a pass
over acc reads two words for each element and writes none. A Replica gives access to p, which a framework keeps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels import CHUNK, KERNELS, CandidateBuffer, Kernels
from ..vectors.sparse import DenseVector, Layout, SparseVector, Values
from .accumulator import Accumulator, CollectingAccumulator

Pieces = Sequence[tuple[int, Any]]
"""The (offset, flat array on the accumulator's device) of p, in ascending order, covering [0, n); read in place."""


class ParameterAccumulator(Accumulator, Protocol):
    """acc = w - p. One step: accumulate, select, release, and later commit. Nothing may change p before `release`."""

    shared: Any
    """w: a flat array of n on the accumulator's device; the same bits on all ranks."""
    _pieces: Pieces = ()

    def start(self, pieces: Pieces) -> None:
        """Set w to p."""
        for offset, piece in pieces:
            self.shared[offset:offset + len(piece)] = piece

    def accumulate(self, pieces: Pieces) -> bool:
        """Read acc = w - p; return True if all of it is finite."""

    def release(self) -> None:
        """Release the pieces: a framework may copy a piece that is still held when it writes there."""
        self._pieces = ()

    def commit(self, update: SparseVector | DenseVector) -> None:
        """Set w to w - update."""

    def read_shared(self) -> Values:
        """Return w on the host; not to be changed."""

    def minus(self, values: Values) -> Any:
        """Return w - values on the accumulator's device, in memory of its own. values: on the host."""

    def part(self, start: int, stop: int) -> ParameterAccumulator:
        """Return an accumulator of w[start:stop], in the same memory; it takes pieces that are `clipped`."""


def clipped(pieces: Pieces, start: int, stop: int) -> Pieces:
    """Return the parts of the pieces that lie in [start, stop), with offsets from start."""
    return [(max(offset - start, 0), piece[max(start - offset, 0):stop - offset]) for offset, piece in pieces
            if offset < stop and offset + len(piece) > start]


class NumpyParameterAccumulator(CollectingAccumulator, ParameterAccumulator):
    """A ParameterAccumulator in host memory, of float32 or float64 as the pieces are."""

    def __init__(self, n: int, dtype: Any = np.float32, kernels: Kernels = KERNELS,
                 shared: NDArray[Any] | None = None) -> None:
        super().__init__(n, dtype, kernels)
        self.shared: NDArray[Any] = np.empty(n, self.dtype) if shared is None else shared
        self._offsets: list[int] = []

    def accumulate(self, pieces: Pieces) -> bool:
        self._pieces, self._offsets = pieces, [offset for offset, _ in pieces]
        self._candidates.count, self._bound = 0, self.expected
        return self._collect(0, self.n, self.expected, self._candidates)

    def _collect(self, start: int, stop: int, threshold: float, buffer: CandidateBuffer) -> bool:
        finite = True
        for offset, piece in self._between(start, stop):
            shared = self.shared[offset:offset + len(piece)]
            finite = self._kernels.subtract_and_collect(shared, piece, threshold, offset, buffer) and finite
        return finite

    def _between(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield p[start:stop]."""
        first = max(bisect_right(self._offsets, start) - 1, 0)
        for offset, piece in self._pieces[first:]:
            if offset >= stop:
                return
            low, high = max(start - offset, 0), min(stop - offset, len(piece))
            if low < high:
                yield offset + low, np.ascontiguousarray(piece[low:high])

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

    def values(self) -> Values:
        return np.concatenate([np.empty(0, self.dtype), *self._chunks()])

    def commit(self, update: SparseVector | DenseVector) -> None:
        if isinstance(update, DenseVector):
            self.shared -= update.values
        else:
            self._kernels.add(self.shared, update.indices, -update.values)

    def read_shared(self) -> Values:
        return self.shared

    def minus(self, values: Values) -> NDArray[Any]:
        difference: NDArray[Any] = self.shared - values
        return difference

    def part(self, start: int, stop: int) -> NumpyParameterAccumulator:
        return NumpyParameterAccumulator(stop - start, self.dtype, self._kernels, self.shared[start:stop])


class Replica(Protocol):
    """The parameters of one model on this rank, in a layout's order. Flat arrays lie on the accumulator's device."""

    def pieces(self) -> Pieces:
        """Return the parameters themselves, in place if possible: to be read until they change."""

    def add(self, delta: SparseVector | DenseVector) -> None:
        """Add delta to p."""

    def assign(self, values: Any) -> None:
        """Set p to these values: a flat array of n."""

    def swap(self, values: Any) -> None:
        """Swap p and these values, parameter by parameter, in place."""

    def logical(self, values: Values) -> Values:
        """Reorder values from the order in memory (channels_last, say) to the order of indices; on the host."""
        return values

    def in_memory(self, values: Values) -> Values:
        """Reorder values from the order of indices to the order in memory."""
        return values


class HostReplica(Replica):
    """A Replica in host memory. read: returns the parameters as flat arrays, in place, in the layout's order."""

    def __init__(self, layout: Layout, read: Callable[[], list[Values]]) -> None:
        self._layout = layout
        self._read = read

    def pieces(self) -> Pieces:
        return list(zip(self._layout.offsets[:-1].tolist(), self._read(), strict=True))

    def add(self, delta: SparseVector | DenseVector) -> None:
        for values, part in zip(self._read(), self._layout.parts(delta), strict=True):
            KERNELS.add(values, part.indices, part.values)

    def assign(self, values: Values) -> None:
        for offset, own in self.pieces():
            own[:] = values[offset:offset + len(own)]

    def swap(self, values: Values) -> None:
        for offset, own in self.pieces():
            part, before = values[offset:offset + len(own)], own.repeat(1)  # a copy, of tensors on a device too
            own[:], part[:] = part, before
