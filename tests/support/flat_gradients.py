"""A step's gradients that are one flat array."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from horovod_oktopk.modes.gradients import LocalGradients, ReducedGradients
from horovod_oktopk.selection.accumulator import Piece
from horovod_oktopk.vectors.layout import Layout
from horovod_oktopk.vectors.sparse import Indices, RunVector, SparseVector, Values


class FlatGradients(LocalGradients, ReducedGradients):
    """Gradients of shape (n,). pieces: arrays that are read, if not this one.

    update: the last one written; until then, the gradients themselves.
    """

    clearable = False

    def __init__(self, values: Values, pieces: Iterable[Piece] | None = None) -> None:
        super().__init__(Layout([("all", values.shape, values.dtype.name)]))
        self.values, self._pieces = values, pieces
        self.update: SparseVector | None = RunVector.between(0, values)

    def pieces(self) -> Iterable[Piece]:
        return [(0, self.values)] if self._pieces is None else self._pieces

    def write(self, update: SparseVector | None, cleared: bool) -> None:
        self.update = update

    def dense_update(self) -> Values | None:
        """Return the update as a dense array; None if the step was undone."""
        if self.update is None:
            return None
        dense = np.zeros_like(self.values)
        dense[self.update.indices] = self.update.values
        return dense

    def elements_of(self, part: int, places: Indices) -> Values:
        found: Values = self.values[places]
        return found

    def all_finite(self) -> bool:
        return bool(np.isfinite(self.values).all())
