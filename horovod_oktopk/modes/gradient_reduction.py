"""The sum or mean of all ranks' gradients, and what a step of it leaves in this rank's residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..hosts.sums import HostAccumulator
from ..phases.agreement import Attendance
from ..schemes.algorithm import EVERYTHING, Memory, Result
from ..schemes.options import Scheme
from ..schemes.step import Outcome, reduce
from ..selection.accumulator import Accumulator, ResidualAccumulator
from ..state.records import Record, Residuals
from ..transport.ranks import Ranks
from ..vectors.layout import Layout
from ..vectors.sparse import RunVector, SparseVector, Values
from .reduction import Reduction

BROADCAST_FIRST = ("the parameters, which must be the same everywhere before the first step (broadcast_parameters; a "
                   "checkpoint that is loaded on all ranks)")


class GradientReduction(Reduction):
    """The reduction of one layout's gradients over the ranks; one object on each rank.

    If `average`, the sum is divided by the number of ranks. `make_accumulator` makes an accumulator of n elements.
    The lines of `signature`, "name: value", must be equal on all ranks.
    """

    def __init__(self, scheme: Scheme, average: bool, layout: Layout,
                 make_accumulator: Callable[[], ResidualAccumulator], ranks: Ranks, title: str,
                 signature: Sequence[str]) -> None:
        super().__init__(scheme, layout, ranks, title, lambda scheme: self.described(scheme, signature),
                         forget=self._owe)
        self._average, self.residuals = average, Residuals(layout, ranks, adds=not average)
        self.may_hold_residual = False
        """True if the residual is one of several ranks, and this rank may be alone now."""
        self.accumulator: ResidualAccumulator = (
            HostAccumulator(layout.n, layout.dtype, lambda: self.worker.hosts) if scheme.hierarchical
            else make_accumulator())

    def _owe(self) -> None:
        self.may_hold_residual = True

    def described(self, scheme: Scheme, signature: Sequence[str]) -> str:
        """Return a description of these options, and of gradients with this signature."""
        return "\n".join([f"compression: {type(scheme).__name__}",
                          *(f"{name}: {value}" for name, value in scheme.settings().items()),
                          f"op: {'Average' if self._average else 'Sum'}", *signature])

    @property
    def first_description(self) -> str:
        digest = self.layout.digest()
        return f"{self.description}\n{BROADCAST_FIRST}: {digest}" if digest else self.description

    def outcome(self, acc: Accumulator, said: Attendance) -> Outcome:
        """Reduce gradients: select from their accumulator acc, exchange; `committed` commits the outcome. Collective.

        `said` is what this rank says in the roll call. One rank alone sends nothing: its own acc is the sum.
        """
        transport = self.transport
        if transport.size > 1:
            return reduce(self.worker.algorithm, acc, said, self.memory, transport, self.layout.n)
        after, report = self.step_alone(said.finite)
        report.phases = transport.phases
        if not said.finite:
            return Outcome(report, after, not_finite=(0,))
        own = RunVector.between(0, acc.values().copy())
        return Outcome(report, after, Result(own, EVERYTHING, after, own))

    def committed(self, outcome: Outcome, commit: Callable[..., None]) -> SparseVector | None:
        """Return the sum or mean, and commit what contributed to it; inside `writing`.

        Return None if some rank was not finite, or the dtypes cannot hold it: then memory and residual stay.
        """
        result, update = outcome.result, None
        if result is not None:
            update = result.update.divided(self.transport.size) if self._average else result.update
        if result is None or update is None or not self.layout.representable(update):
            outcome.report.finite = False
            return None
        self.memory, self.may_hold_residual = outcome.memory, False
        commit(result.contributed, result.remainder)
        return update

    def record(self, residual: Values) -> Record:
        """Return the record of this residual, as of the last finished step."""
        return self.residuals.record_of(residual, self.memory.record(), level=self.control.found)

    def restore(self, record: Record) -> None:
        self.memory = Memory.from_record(record["algorithm"])
        self.accumulator.load_residual(record["residual"])
        self.may_hold_residual = bool(record["residual"].any())
        self.measure_from(record["level"])
