"""The result of one step of a scheme, for whoever holds the accumulator."""

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
    """The sparse sum, the same bits on every rank; None where some rank's gradient was not finite."""
    contributed: Indices | slice
    """Indices of this rank's acc that contributed to the update; EVERYTHING where all did."""
    report: StepReport
    remainder: SparseVector | None = None
    """What rounding left over of the values sent, for this rank's residual; None where they were sent exactly."""
    selected: SparseVector | DenseVector | None = None
    """What this rank has selected of its acc; None where nothing was reduced."""

    not_finite: tuple[int, ...] = ()
    """The ranks whose acc was not."""

    def sent(self) -> SparseVector | DenseVector:
        """Return the elements that contributed to the update, with their values in this rank's acc."""
        assert self.selected is not None
        if isinstance(self.selected, DenseVector) or isinstance(self.contributed, slice):
            return self.selected
        if len(self.contributed) == len(self.selected):
            return self.selected
        return self.selected.take(KERNELS.common_positions(self.selected.indices, self.contributed))
