"""What TopkA, TopkDSA, gTopk and Gaussiank have in common: select locally, hold the roll call, exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..phases.agreement import roll_call
from ..selection.accumulator import Accumulator
from ..selection.local_top_k import local_top_k
from ..vectors.sparse import Indices, SparseVector
from .report import StepReport
from .step_result import StepResult

if TYPE_CHECKING:
    from ..transport.counting import CountingTransport


class TopkScheme:
    """A sparse allreduce without memory of earlier steps, but for the step counter; one object on each rank.

    description: what must be equal on all ranks, one "name: value" a line.
    A scheme gives `counts` and `exchange`, and `select` where it does not select the exact top-k.
    """

    def __init__(self, description: str) -> None:
        self.description = description
        self.step = 0

    def reduce(self, acc: Accumulator, k: int, finite: bool, transport: CountingTransport) -> StepResult:
        """One step. The caller commits `contributed` to acc, or drops the step.

        finite: whether this rank's acc is. Raises AgreementError or TransportError, on every rank.
        """
        report = StepReport(step=self.step + 1, n=acc.n, k=k, phases=transport.phases)
        with transport.phase("select"):
            threshold, selection = self.select(acc, k) if finite else (0.0, SparseVector.empty(acc.dtype))
        with transport.phase("agree"):
            call = roll_call(transport, self.description, k, self.step, finite, state=1,
                             counts=self.counts(selection, acc.n, transport.size))
        report.step = call.step + 1
        if not call.finite:
            report.finite = False
            return StepResult(None, np.empty(0, np.int64), report)
        update, contributed = self.exchange(selection, call.counts, k, acc.n, transport)
        self.step = report.step
        report.local_selected, report.global_selected = len(selection), len(update)
        report.local_threshold = threshold
        return StepResult(update, contributed, report)

    def select(self, acc: Accumulator, k: int) -> tuple[float, SparseVector]:
        """The threshold, and what this rank selects: the exact top-k."""
        return local_top_k(acc, k)

    def counts(self, selection: SparseVector, _n: int, _size: int) -> NDArray[np.int64]:
        """What the others must know of the selection before they exchange: its length."""
        return np.array([len(selection)], np.int64)

    def exchange(self, selection: SparseVector, counts: NDArray[np.int64], k: int, n: int,
                 transport: CountingTransport) -> tuple[SparseVector, Indices]:
        """The update, and the indices of this rank's selection that are in it. counts: everyone's, shape (P, ...)."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same bits: plain numbers."""
        return {"step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what `state` gave."""
        self.step = state["step"]

    def forget(self) -> None:
        """Nothing depends on who the ranks are."""
