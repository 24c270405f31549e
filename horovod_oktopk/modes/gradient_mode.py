"""The reduction of one model's gradients, step after step: the part that every integration has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from ..errors import PluginError
from ..hosts.sums import HostAccumulator
from ..schemes.algorithm import EVERYTHING, Memory, Result
from ..schemes.base import Scheme
from ..schemes.step import Outcome, reduce
from ..selection.accumulator import Accumulator, ResidualAccumulator
from ..state.records import Record
from ..transport.base import Ranks
from ..vectors.layout import Layout
from ..vectors.sparse import DenseVector, Values
from .gradients import ReducedGradients, Update
from .mode import Channel, Mode


class GradientMode(Mode[ReducedGradients]):
    """The reduction of one layout's gradients over the ranks; one object on each rank.

    If `average`, the sum is divided by the number of ranks. `make_accumulator` makes an accumulator of n elements.
    The lines of `signature`, "name: value", must be equal on all ranks; they default to the layout's description.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "zero_rows": "Keras' Adafactor makes weights NaN if a row and a column of a gradient are all zeros, as in "
                     "sparse updates: give Adafactor(epsilon_1={least:g}); got epsilon_1={got:g}"}

    def __init__(self, options: Scheme, average: bool, layout: Layout,
                 make_accumulator: Callable[[], ResidualAccumulator], ranks: Ranks,
                 signature: Sequence[str] | None = None) -> None:
        super().__init__(options, layout, ranks)
        self.title, self._average = type(options).__name__, average
        self._signature = layout.describe() if signature is None else signature
        self._owes = False  # a residual of several ranks, on one that may be alone now
        self.accumulator: ResidualAccumulator = (
            HostAccumulator(layout.n, layout.dtype, lambda: self.worker.hosts) if options.hierarchical
            else make_accumulator())

    # A step.

    def reduce(self, gradients: ReducedGradients, others_finite: bool = True) -> None:
        self.connect()
        if self.is_alone and not self._owes:
            self.report = self.alone_report(gradients.all_finite() and others_finite)
            return
        transport = self.open()
        self.worker.agree(self.said())
        with transport.phase("accumulate"):
            finite = self.accumulator.accumulate(gradients.pieces(), clear=gradients.clearable)
        outcome = self._reduced(self.accumulator, finite and others_finite)
        self._note(outcome.report)
        self.hear(outcome.level)
        update = self._committed(outcome, self.accumulator.commit)
        with self.writing(outcome.report):
            gradients.write(update, gradients.clearable)

    @classmethod
    def channel(cls, options: Any) -> Channel:  # noqa: ARG003
        return Channel(own=False, yields=False)

    def begin(self, gradients: ReducedGradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        return 0 if scaled and self.report is not None and not self.report.finite else 1

    def _reduced(self, acc: Accumulator, finite: bool) -> Outcome:
        """Return the outcome of a step; on one rank everything, as that is the sum."""
        if not self.is_alone:
            return reduce(self.worker.algorithm, acc, self.said(finite), self.memory, self.transport, self.layout.n)
        before, report = self.memory, self.alone_report(finite)
        after, self.memory, report.phases = self.memory, before, self.transport.phases
        if not finite:
            return Outcome(report, after, not_finite=(0,))
        own = DenseVector(acc.values().copy())
        return Outcome(report, after, Result(own, EVERYTHING, after, own))

    def _committed(self, outcome: Outcome, commit: Callable[..., None]) -> Update | None:
        """Return the update, and commit what contributed to it; or None, and nothing has changed."""
        with self.writing(outcome.report):
            result, update = outcome.result, None
            if result is not None:
                update = result.update.divided(self.transport.size) if self._average else result.update
            if result is None or update is None or not self.layout.representable(update):
                outcome.report.finite = False
                return None
            self.memory, self._owes = outcome.memory, False
            commit(result.contributed, result.remainder)
        return update

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
        return {**self.record_of(self.read_residual(), self.memory.record()), "level": self.control.level}

    def restore(self, record: Record) -> None:
        self.memory = Memory.from_record(record["algorithm"])
        self.accumulator.load_residual(record["residual"])
        self._owes = bool(record["residual"].any())
        self.measure_from(record.get("level", 0))

    # The ranks.

    def forget_ranks(self) -> None:
        self._owes = True
        super().forget_ranks()

    @property
    def description(self) -> str:
        return self._described_by(self._signature)

    def _described_by(self, signature: Sequence[str]) -> str:
        return "\n".join([f"compression: {type(self.scheme).__name__}",
                          *(f"{name}: {value}" for name, value in self.scheme.settings().items()),
                          f"op: {'Average' if self._average else 'Sum'}", *signature])
