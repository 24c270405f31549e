"""The gradients that a rank has handed in since it last contributed to a round."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...schemes.step_result import StepResult
from ...selection.accumulator import Accumulator, EmptyAccumulator, ResidualAccumulator
from ...vectors.layout import Layout
from ...vectors.sparse import SparseVector, Values, sum_of
from ..mode import Piece

NOWHERE = np.empty(0, np.int64)


class Pending:
    """Residual + gradients of one rank. `accumulator` holds them from `hand_in` until a round commits them.

    is_finite: True if all gradients were since this rank last contributed.
    """

    def __init__(self, accumulator: ResidualAccumulator, layout: Layout) -> None:
        self._accumulator = accumulator
        self._nothing = EmptyAccumulator(layout.n, layout.dtype)
        self._is_held = self._contributes = False
        self.is_finite = True
        self._remainders: list[SparseVector] = []
        """Rounding errors of rounds to which this rank contributed nothing; for its next commit."""

    def hand_in(self, pieces: Iterable[Piece]) -> None:
        """Add gradients to the residual, and to the gradients that wait."""
        held, self._is_held = self._is_held, False  # also where what follows fails
        if held:
            self._accumulator.commit(NOWHERE)
        self._is_held = self._accumulator.accumulate(pieces)
        self.is_finite = self.is_finite and self._is_held

    def for_round(self, contributes: bool) -> Accumulator:
        """Return what this rank gives to a round: an accumulator of nothing if it does not contribute."""
        self._contributes = contributes and self._is_held
        return self._accumulator if self._contributes else self._nothing

    def commit(self, result: StepResult) -> None:
        """Commit a round. Its remainder: rounding errors of this rank's selection and of sums that it rounded."""
        remainder = result.remainder
        if remainder is not None and len(remainder):
            self._remainders.append(remainder)
        if self._contributes:
            self._accumulator.commit(result.contributed, sum_of(self._remainders) if self._remainders else None)
            self._remainders.clear()
            self._is_held = False

    def read(self) -> Values:
        """Return a copy of the residual and all that waits: shape (n,)."""
        values = self._accumulator.values().copy() if self._is_held else self._accumulator.read_residual()
        for remainder in self._remainders:
            values[remainder.indices] += remainder.values
        return values
