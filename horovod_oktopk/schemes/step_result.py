"""The result of one step of a scheme, for the owner of the accumulator."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels import KERNELS
from ..vectors.sparse import DenseVector, Indices, SparseVector
from .report import StepReport

EVERYTHING = slice(None)


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step on one rank."""

    update: SparseVector | DenseVector | None
    """The sparse sum, the same bits on every rank; None if some rank's gradient was not finite."""
    contributed: Indices | slice
    """Indices of this rank's acc that contributed to the update; EVERYTHING if all did."""
    report: StepReport
    remainder: SparseVector | None = None
    """Rounding errors of the sent values, for this rank's residual; None if values were sent exactly."""
    selected: SparseVector | DenseVector | None = None
    """The elements that this rank has selected of its acc; None if nothing was reduced."""

    not_finite: tuple[int, ...] = ()
    """The ranks whose acc was not finite."""

    def sent(self) -> SparseVector | DenseVector:
        """Return the elements that contributed to the update, with their values in this rank's acc."""
        assert self.selected is not None
        if isinstance(self.selected, DenseVector) or isinstance(self.contributed, slice):
            return self.selected
        if len(self.contributed) == len(self.selected):
            return self.selected
        return self.selected.take(KERNELS.common_positions(self.selected.indices, self.contributed))
