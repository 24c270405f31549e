"""The reduction of one model's gradients, step after step: the part that every integration has in common.

An integration defines the gradients' places (a Layout), hands them over as pieces, and writes the returned sparse
update into its framework's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, NoReturn

import numpy as np

from ..errors import PluginError
from ..schemes.algorithm import Algorithm
from ..schemes.base import Scheme
from ..schemes.report import StepReport, sum_of_phases
from ..schemes.step_result import StepResult
from ..selection.accumulator import ResidualAccumulator
from ..state.records import THIS_PROCESS, Record, check_residuals, record, share_of
from ..transport.counting import CountingTransport
from ..transport.ranks import Ranks
from ..vectors.layout import L
from ..vectors.sparse import SparseVector, Values
from .connection import Connection
from .hosts.accumulator import HostAccumulator
from .mode import Gradients, Mode, Update


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
        self.options = options
        self.layout = layout
        self.ranks = ranks
        self.report: StepReport | None = None
        self._average = average
        self._signature = layout.describe() if signature is None else signature
        self._connection = Connection(ranks, options.transport, options.hierarchical, self._subject)
        self._before: dict[str, Any] | None = None  # the algorithm's state, while a step is under way
        make = self._share_of_host if options.hierarchical else make_accumulator
        self.accumulator: ResidualAccumulator = make(layout)
        self.algorithm: Algorithm = options.algorithm()
        self._describe()

    # A step.

    def reduce(self, gradients: Gradients, others_finite: bool = True) -> None:
        self.connect()
        self._undo()  # a step that has failed
        self._before = self.algorithm.state()
        self._transport.reset()
        update = self._finish(self._reduce(gradients, others_finite) if self.layout.n else
                              self._reduce_nothing(others_finite))
        with self._writing():
            gradients.write(update, gradients.clearable)

    def _reduce(self, gradients: Gradients, others_finite: bool) -> StepResult:
        self.algorithm.agree_on_host(self._k, self._transport)
        with self._transport.phase("accumulate"):
            finite = self.accumulator.accumulate(gradients.pieces(), clear=gradients.clearable)
        return self.algorithm.reduce(self.accumulator, self._k, finite and others_finite, self._transport,
                                     whole=self.layout.n)

    def begin(self, gradients: Gradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        return 0 if scaled and self.report is not None and not self.report.finite else 1

    def _share_of_host(self, layout: L) -> HostAccumulator:
        return HostAccumulator(layout.n, layout.dtype, lambda: self._connection.hosts)

    def _reduce_nothing(self, finite: bool) -> StepResult:
        finite = self.check_agreement(self.description, finite)
        report = StepReport(step=self.algorithm.step, n=0, k=0, phases=self._transport.phases, finite=finite)
        return StepResult(SparseVector.empty(self.layout.dtype) if finite else None, np.empty(0, np.int64), report)

    def _finish(self, result: StepResult) -> Update | None:
        """Commit a step, or undo it if it is not finite; return its update."""
        self.report = result.report
        with self._writing():
            update = self._update_of(result)
            if update is None:
                self._undo()
                self.report.finite = False
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
            update = update.divided(self._transport.everyone.size)
        return update if update is not None and self.layout.representable(update) else None

    @property
    def last_report(self) -> StepReport | None:
        """Report of the last step; None before the first."""
        return self.report

    def _writing(self) -> AbstractContextManager[None]:
        """Count and time the block as the step's write-back."""
        return self._reported("write_back")

    @contextmanager
    def _reported(self, phase: str) -> Iterator[None]:
        """Add the traffic of the block to the last step's report, which shares nothing with the transport."""
        assert self.report is not None
        self._transport.reset()
        with self._transport.phase(phase):
            yield
        self.report.phases = sum_of_phases([self.report.phases, self._transport.phases])
        self._transport.reset()

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:
        self.connect()
        own = [*self.layout.describe(), message] if signature is None else signature
        self.check_agreement(self._description(own))
        raise PluginError(message)

    def set_density(self, density: float | None) -> None:
        """Set the fraction of the elements to select from the next step on; None: that of the options again.

        Raise OptionError for a density that is not allowed.
        """
        self.options = self.options.with_density(density)
        self._describe()

    # The state.

    def read_residual(self) -> Values:
        """Return a copy of this rank's residual: NumPy, shape (n,), in the layout's order."""
        return self.accumulator.read_residual()

    def record(self) -> Record:
        """Return this rank's residual (a copy, NumPy) and counters, for `load`: of the last finished step."""
        return record(*self.ranks.membership()[:2], self.layout, self.read_residual(), None,
                      self._before or self.algorithm.state())

    def load(self, records: Sequence[Record]) -> None:
        """Load this rank's share of the records that `record` returned on these or other ranks; none starts anew."""
        check_residuals(records)
        self.take(share_of(records, *self.ranks.membership()[:2], self.layout, process=THIS_PROCESS))

    def take(self, share: Record) -> None:
        """Restore this rank's share of a saved state, as `share_of` returned it."""
        self._before = None
        self.algorithm.resume(share["algorithm"])
        residual, scale = share["residual"], share["residual_scale"]  # a loss scale, in files of earlier versions
        self.accumulator.load_residual(residual / residual.dtype.type(scale) if scale else residual)

    # The ranks.

    @property
    def description(self) -> str:
        """The options and parameters that must be equal on all ranks."""
        return self.algorithm.description

    def _subject(self) -> str:
        """Return a text on this reduction, for the log."""
        return f"{self._name}: {self.layout.summary(self._k)}"

    @property
    def _name(self) -> str:
        """The name of the compression."""
        return type(self.options).__name__

    def _describe(self) -> None:
        self.algorithm.description = self._description(self._signature)

    def _description(self, signature: Sequence[str]) -> str:
        settings = [f"{name}: {value}" for name, value in self.options.settings().items()]
        return "\n".join([f"compression: {type(self.options).__name__}", *settings,
                          f"op: {'Average' if self._average else 'Sum'}", *signature])

    def reset_if_membership_changed(self) -> None:
        """Forget all that depends on the ranks, if elastic training has changed them; before a step."""
        if self._connection.lost():
            self._before = None
            self.algorithm.forget()

    def connect(self) -> CountingTransport:
        """Return the transport to all ranks; a new one if elastic training has changed them. Collective."""
        self.reset_if_membership_changed()
        return self._connection.connect(self.description, self._k).everyone

    @property
    def _transport(self) -> CountingTransport:
        return self._connection.transport

    def check_agreement(self, description: str, finite: bool = True) -> bool:
        """Hold a roll call alone; return True if all ranks are `finite`. Collective."""
        return self.algorithm.check_agreement(description, self._k, self._transport, finite)

    @property
    def _k(self) -> int:
        return self.options.k_of(self.layout.n) if self.layout.n else 0
