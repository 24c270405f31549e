"""A rank's own parameters p, which a framework keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ...kernels import KERNELS
from ...selection.parameter_accumulator import Pieces
from ...vectors.layout import Layout
from ...vectors.sparse import DenseVector, SparseVector, Values


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

    def in_memory(self, values: Values) -> Values:
        """Reorder values from the order of indices to the order in memory."""


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
            part = values[offset:offset + len(own)]
            before: Values = np.array(own)
            own[:], part[:] = part, before

    def logical(self, values: Values) -> Values:
        return values

    def in_memory(self, values: Values) -> Values:
        return values
