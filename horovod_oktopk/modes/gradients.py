"""The reduction of one model's gradients, step after step: the part that every integration has in common.

An integration defines the gradients' places (a Layout), hands them over as pieces, and writes the returned sparse
update into its framework's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn

import numpy as np

from ..errors import PluginError
from ..schemes.base import Scheme
from ..schemes.report import StepReport, StepResult
from ..selection.accumulator import ResidualAccumulator
from ..state.records import Record, record
from ..transport.counting import CountingTransport
from ..transport.ranks import Ranks
from ..vectors.sparse import L, SparseVector, Values
from .host_sums import HostAccumulator
from .mode import Gradients, Mode, Update
from .reduction import Reduction


class GradientMode(Mode, Generic[L]):
    """The reduction of one layout's gradients over the ranks; one object on each rank.

    average: True if the sum is divided by the number of ranks. make_accumulator: makes one for the layout.
    signature: lines that must be equal on all ranks, "name: value"; the layout's description if not given.
    """

    acts_at_step = False
    layout: L

    def __init__(self, options: Scheme, average: bool, layout: L,
                 make_accumulator: Callable[[L], ResidualAccumulator], ranks: Ranks,
                 signature: Sequence[str] | None = None) -> None:
        self._average = average
        self._signature = layout.describe() if signature is None else signature
        super().__init__(layout, Reduction(options, self.unit, layout, ranks, self._describe, self._title))
        self._before: dict[str, Any] | None = None  # the algorithm's state, while a step is under way
        self.accumulator: ResidualAccumulator = (
            HostAccumulator(layout.n, layout.dtype, lambda: self.reduction.transport.hosts) if options.hierarchical
            else make_accumulator(layout))
        self.algorithm = self.reduction.algorithm

    # A step.

    def reduce(self, gradients: Gradients, others_finite: bool = True) -> None:
        self.connect()
        self._undo()  # a step that has failed
        self._before = self.algorithm.state()
        transport = self.reduction.open()
        update = self._commit_or_undo(self._reduce(gradients, others_finite, transport) if self.layout.n else
                                      self._reduce_nothing(others_finite, transport))
        with self.reduction.writing():
            gradients.write(update, gradients.clearable)

    def _reduce(self, gradients: Gradients, others_finite: bool, transport: CountingTransport) -> StepResult:
        k = self.reduction.k
        self.algorithm.agree_on_host(k, transport)
        with transport.phase("accumulate"):
            finite = self.accumulator.accumulate(gradients.pieces(), clear=gradients.clearable)
        return self.algorithm.reduce(self.accumulator, k, finite and others_finite, transport, whole=self.layout.n)

    def _reduce_nothing(self, finite: bool, transport: CountingTransport) -> StepResult:
        finite = self.reduction.check_agreement(self.description, finite)
        report = StepReport(step=self.algorithm.step, n=0, k=0, phases=transport.phases, finite=finite)
        return StepResult(SparseVector.empty(self.layout.dtype) if finite else None, np.empty(0, np.int64), report)

    def begin(self, gradients: Gradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        return 0 if scaled and self.report is not None and not self.report.finite else 1

    def _commit_or_undo(self, result: StepResult) -> Update | None:
        """Commit a step, or undo it if it is not finite; return its update."""
        self.reduction.report = result.report
        with self.reduction.writing():
            update = self._update_of(result)
            if update is None:
                self._undo()
                result.report.finite = False
                return None
            self._before = None
            if self.layout.n:
                self._commit(result)
        return update

    def _commit(self, result: StepResult) -> None:
        self.accumulator.commit(result.contributed, result.remainder)

    def _undo(self) -> None:
        if self._before is not None:
            self.algorithm.load_state(self._before)
            self._before = None

    def _update_of(self, result: StepResult) -> Update | None:
        update = result.update
        if update is not None and self._average:
            update = update.divided(self.reduction.transport.everyone.size)
        return update if update is not None and self.layout.representable(update) else None

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:
        self.connect()
        own = [*self.layout.describe(), message] if signature is None else signature
        self.check_agreement(self._describe(self.reduction.scheme, own))
        raise PluginError(message)

    # The state.

    def read_residual(self) -> Values:
        """Return a copy of this rank's residual: NumPy, shape (n,), in the layout's order."""
        return self.accumulator.read_residual()

    def record(self) -> Record:
        """Return this rank's residual (a copy, NumPy) and counters, for `load`: of the last finished step."""
        return record(*self.ranks.membership()[:2], self.layout, self.read_residual(), None,
                      self._before or self.algorithm.state())

    def take(self, share: Record) -> None:
        """Restore this rank's share of a saved state, as `share_of` returned it."""
        self._before = None
        self.algorithm.resume(share["algorithm"])
        residual, scale = share["residual"], share["residual_scale"]  # a loss scale, in files of earlier versions
        self.accumulator.load_residual(residual / residual.dtype.type(scale) if scale else residual)

    # The ranks.

    def connect(self) -> CountingTransport:
        """Return the transport to all ranks; a new one if elastic training has changed them. Collective."""
        self.reset_if_membership_changed()
        return self.reduction.connect()

    def reset_if_membership_changed(self) -> None:
        """Forget all that depends on the ranks, if elastic training has changed them; before a step."""
        if self.reduction.lost():
            self._before = None
            self.algorithm.forget()

    def _title(self) -> str:
        return type(self.reduction.scheme).__name__

    def _describe(self, scheme: Scheme, signature: Sequence[str] | None = None) -> str:
        return "\n".join([f"compression: {type(scheme).__name__}",
                          *(f"{name}: {value}" for name, value in scheme.settings().items()),
                          f"op: {'Average' if self._average else 'Sum'}",
                          *(self._signature if signature is None else signature)])
