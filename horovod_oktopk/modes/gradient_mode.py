"""The reduction of one model's gradients, step after step: the part that every integration has in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import PluginError
from ..schemes.base import Scheme
from ..schemes.report import EVERYTHING, StepResult
from ..selection.accumulator import Accumulator, ResidualAccumulator
from ..state.records import Record
from ..transport.base import Ranks
from ..vectors.sparse import DenseVector, Layout, Values
from .gradients import ReducedGradients, Update
from .host_sums import HostAccumulator
from .mode import Mode


class GradientMode(Mode[ReducedGradients]):
    """The reduction of one layout's gradients over the ranks; one object on each rank.

    average: True if the sum is divided by the number of ranks. make_accumulator: makes one of n elements.
    signature: lines that must be equal on all ranks, "name: value"; the layout's description if not given.
    """

    acts_at_step = False

    def __init__(self, options: Scheme, average: bool, layout: Layout,
                 make_accumulator: Callable[[], ResidualAccumulator], ranks: Ranks,
                 signature: Sequence[str] | None = None) -> None:
        super().__init__(options, layout, ranks)
        self.title, self._average = type(options).__name__, average
        self._signature = layout.describe() if signature is None else signature
        self._before: dict[str, Any] | None = None  # the algorithm's state, while a step is under way
        self._owes = False  # a residual of several ranks, on one that may be alone now
        self.accumulator: ResidualAccumulator = (
            HostAccumulator(layout.n, layout.dtype, lambda: self.transport.hosts) if options.hierarchical
            else make_accumulator())

    # A step.

    def reduce(self, gradients: ReducedGradients, others_finite: bool = True) -> None:
        self.connect()
        self._undo()  # a step that has failed
        if self.is_alone and not self._owes:
            self.report = self.alone_report(gradients.all_finite() and others_finite)
            return
        self._before = self.algorithm.state()
        transport = self.open()
        self.algorithm.agree_on_host(self.k, transport)
        with transport.phase("accumulate"):
            finite = self.accumulator.accumulate(gradients.pieces(), clear=gradients.clearable)
        result = self._reduced(self.accumulator, finite and others_finite)
        self._note(result.report)
        update = self._commit_or_undo(result, self.accumulator.commit)
        with self.writing(result.report):
            gradients.write(update, gradients.clearable)

    def begin(self, gradients: ReducedGradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        return 0 if scaled and self.report is not None and not self.report.finite else 1

    def _reduced(self, acc: Accumulator, finite: bool) -> StepResult:
        """Return the result of a step; on one rank everything, as that is the sum."""
        if not self.is_alone:
            return self.algorithm.reduce(acc, self.k, finite, self.transport, whole=self.layout.n)
        report = self.alone_report(finite)
        report.phases = self.transport.phases
        if not finite:
            return StepResult(None, EVERYTHING, report, not_finite=(0,))
        return StepResult(DenseVector(acc.values().copy()), EVERYTHING, report)

    def _commit_or_undo(self, result: StepResult, commit: Callable[..., None]) -> Update | None:
        with self.writing(result.report):
            update = result.update
            if update is not None and self._average:
                update = update.divided(self.transport.everyone.size)
            if update is None or not self.layout.representable(update):
                self._undo()
                result.report.finite = False
                return None
            self._before, self._owes = None, False
            commit(result.contributed, result.remainder)
        return update

    def _undo(self) -> None:
        if self._before is not None:
            self.algorithm.load_state(self._before)
            self._before = None

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:
        self.connect()
        signature = [*self.layout.describe(), message] if signature is None else signature
        self.check_agreement(self._described_by(signature))
        raise PluginError(message)

    # The state.

    def read_residual(self) -> Values:
        """Return a copy of this rank's residual: NumPy, shape (n,), in the layout's order."""
        return self.accumulator.read_residual()

    def record(self) -> Record:
        """Return this rank's residual and counters, as of the last finished step."""
        return self.record_of(self.read_residual(), self._before or self.algorithm.state())

    def take(self, share: Record) -> None:
        self._before = None
        self.algorithm.resume(share["algorithm"])
        residual, scale = share["residual"], share["residual_scale"]  # a loss scale, in files of earlier versions
        self.accumulator.load_residual(residual / residual.dtype.type(scale) if scale else residual)
        self._owes = bool(residual.any())

    # The ranks.

    def forget_ranks(self) -> None:
        self._before, self._owes = None, True
        super().forget_ranks()

    @property
    def description(self) -> str:
        return self._described_by(self._signature)

    def _described_by(self, signature: Sequence[str]) -> str:
        return "\n".join([f"compression: {type(self.scheme).__name__}",
                          *(f"{name}: {value}" for name, value in self.scheme.settings().items()),
                          f"op: {'Average' if self._average else 'Sum'}", *signature])
