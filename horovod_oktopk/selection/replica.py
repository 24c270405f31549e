"""A rank's own parameters p, in the memory of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..vectors.layout import Layout
from ..vectors.sparse import SparseVector, Values
from .accumulator import Pieces


class Replica:
    """The parameters of one model on this rank, in a layout's order; here in host memory.

    `read` returns the parameters as flat arrays on the accumulator's device, in place if possible.
    """

    def __init__(self, layout: Layout, read: Callable[[], list[Any]]) -> None:
        self._layout, self._read = layout, read

    def pieces(self) -> Pieces:
        """Return the parameters themselves: to be read until they change."""
        return list(zip(self._layout.offsets[:-1].tolist(), self._read(), strict=True))

    def add(self, delta: SparseVector) -> None:
        """Add delta to p."""
        for (offset, own), part in zip(self.pieces(), self._layout.cut(delta), strict=True):
            part.add_to(own, offset)

    def assign(self, values: Any) -> None:
        """Set p to these values: a flat array of n on the accumulator's device."""
        for offset, own in self.pieces():
            own[:] = values[offset:offset + len(own)]

    def swap(self, values: Any) -> None:
        """Swap p and these values, parameter by parameter, in place."""
        for offset, own in self.pieces():
            part, before = values[offset:offset + len(own)], own.repeat(1)  # a copy, of tensors on a device too
            own[:], part[:] = part, before

    def logical(self, values: Values) -> Values:
        """Reorder values from the order in memory (channels_last, say) to the order of indices; on the host."""
        return values

    def in_memory(self, values: Values) -> Values:
        """Reorder values from the order of indices to the order in memory."""
        return values
