"""What one step of a scheme gives to whoever holds the accumulator."""

from __future__ import annotations

from dataclasses import dataclass

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
