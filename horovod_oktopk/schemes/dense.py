"""The dense allreduce, as a scheme beside the sparse ones: all n elements, and nothing stays in the residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..phases.agreement import roll_call
from ..selection.accumulator import Accumulator
from ..vectors.sparse import DenseVector
from .base import TopkScheme
from .report import StepReport
from .step_result import EVERYTHING, StepResult

if TYPE_CHECKING:
    from ..transport.counting import CountingTransport


class DenseAllreduce(TopkScheme):
    """u = Σ acc. A rank sends 2n(P-1)/P words."""

    def reduce(self, acc: Accumulator, k: int, finite: bool, transport: CountingTransport) -> StepResult:
        report = StepReport(step=self.step + 1, n=acc.n, k=k, phases=transport.phases)
        with transport.phase("agree"):
            call = roll_call(transport, self.description, k, self.step, finite, state=1, counts=np.empty(0, np.int64))
        report.step = call.step + 1
        if not call.finite:
            report.finite = False
            return StepResult(None, np.empty(0, np.int64), report)
        self.step = report.step
        return reduce_densely(acc, report, transport)


def reduce_densely(acc: Accumulator, report: StepReport, transport: CountingTransport) -> StepResult:
    """The sum of all elements of all ranks, once they have agreed on the step."""
    report.strategy = "dense"
    with transport.phase("allreduce"):
        total = transport.allreduce(acc.values())
    report.local_selected = report.global_selected = acc.n
    return StepResult(DenseVector(total), EVERYTHING, report)
