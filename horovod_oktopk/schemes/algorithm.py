"""The base of all schemes' algorithms. A step is opened here, and holds the data of all its phases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import AgreementError
from ..phases.agreement import Attendance, RollCall, roll_call, tell
from ..phases.exchange import SparseTransport, whole_update
from ..selection.accumulator import Accumulator
from ..selection.global_top_k import GlobalThreshold
from ..selection.local_top_k import local_top_k
from ..transport.base import Counts
from ..transport.counting import CountingTransport, Phase
from ..vectors.sparse import DenseVector, Indices, SparseVector, Values
from ..vectors.wire import ValueDtype, WireCodec
from .report import StepReport, StepResult

NOTHING = np.empty(0, np.int64)


@dataclass
class Step:
    """One step on one rank: the data of all of its phases.

    acc: of this rank's elements. finite: True if acc is. k: of all of this worker's elements. transport: to the other
    workers. A worker is a rank; or it is a host, and then its ranks have a share of its elements each.
    """

    acc: Accumulator
    k: int
    finite: bool
    transport: CountingTransport
    report: StepReport
    selected: SparseVector = field(init=False)
    """The elements of acc that this rank has selected."""
    threshold: float = 0.0
    """The magnitude that the selected elements pass."""
    largest: float = 0.0
    """The largest magnitude that this worker has selected."""
    call: RollCall = field(init=False)
    """The result of the roll call that opened the step."""
    counts: Counts = field(init=False)
    """The counts that ranks told of their selections; see `agreement.tell`."""
    share_k: float = field(init=False)
    """Number of elements of this share that the mean worker has selected: k, if the vector is not divided."""
    lengths: Counts = field(init=False)
    """Number of elements that each worker has selected of this share; only if the vector is divided."""
    sample: Values = field(init=False)
    """The measurements that this rank tells; see `agreement.Attendance`."""
    is_joint: bool = False
    """True if the ranks of a host have selected together."""

    @property
    def n(self) -> int:
        """The number of elements of acc."""
        return self.acc.n

    @property
    def t(self) -> int:
        """The step counter, from 1; the same on all ranks."""
        return self.call.step + 1

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Count and time the block under this name."""
        return self.transport.phase(name)

    def sparse_transport(self, value_dtype: ValueDtype | None = None) -> SparseTransport:
        """Return the transport of sparse vectors to the other ranks, for this rank's selection first."""
        codec = WireCodec(self.acc.dtype, value_dtype)
        return SparseTransport(self.transport, codec.spanning(self.threshold, self.largest))

    def result(self, update: SparseVector | DenseVector, contributed: Indices | slice,
               remainder: SparseVector | None = None) -> StepResult:
        """Return the result of a step that was taken; see StepResult."""
        self.report.local_selected, self.report.global_selected = len(self.selected), len(update)
        self.report.local_threshold = self.threshold
        return StepResult(update, contributed, self.report, remainder, self.selected)


class Algorithm(ABC):
    """A sparse allreduce of one flat vector over the steps; one object on each rank.

    A scheme gives `exchange`, and anything else that differs: its selection, its counts for the roll call, and
    its memory of the steps before.

    description: options and parameters that must be equal on all ranks, one "name: value" a line. samples: the length
    of `Step.sample`; every roll call has as many, so that ranks that differ still meet in one. rates: see Attendance.
    """

    description = ""
    step = samples = rates = 0

    def reduce(self, acc: Accumulator, k: int, finite: bool, transport: CountingTransport,
               whole: int | None = None) -> StepResult:
        """Take one step. Collective. The caller commits `contributed` to acc, or drops the step.

        finite: True if this rank's acc is. whole: number of the worker's elements, if acc has a share of them.
        Raise AgreementError or TransportError, on every rank.
        """
        step = self.begin(acc, k, finite, transport, whole)
        with transport.step():
            return self.complete(step)

    def begin(self, acc: Accumulator, k: int, finite: bool, transport: CountingTransport, whole: int | None = None,
              ) -> Step:
        """Begin a step with the part that reads acc: select, and communicate with no rank."""
        n = acc.n if whole is None else whole
        step = Step(acc, k, finite, transport, StepReport(self.step + 1, n, min(k, n), phases=transport.phases))
        step.report.global_k = self.global_k(k, n, transport.size)
        step.selected = self.select(step)
        step.sample = np.full(self.samples, np.nan, np.float32)
        step.largest = float(np.abs(step.selected.values).max(initial=0))
        return step

    def complete(self, step: Step) -> StepResult:
        """Complete a step with the part that communicates, within `transport.step`. Collective."""
        hosts = step.transport.hosts
        with step.phase("agree"):
            counts = self.counts(step.selected, step.n, step.transport.size) if hosts is None else NOTHING
            step.call = roll_call(Attendance(self.description, step.k, self.step, step.finite, self.is_complete(),
                                             counts, step.sample, self.rates), step.transport.everyone)
        step.report.step, step.report.same_rates = step.t, step.call.same_rates
        if not step.call.finite:
            step.report.finite = False
            return StepResult(None, NOTHING, step.report, not_finite=step.call.not_finite)
        step.counts, step.share_k = step.call.counts, step.k
        if hosts is not None:
            self._join_shares(step)
        result = self.exchange(step)
        if hosts is not None:
            assert isinstance(result.update, SparseVector)
            with step.phase("host_gather"):
                update = whole_update(result.update, hosts.bounds(step.report.n), hosts.within)
            step.report.global_selected = len(update)
            result = replace(result, update=update)
        self.step = step.t
        return result

    def select_together(self, step: Step) -> None:
        """Reduce the selections of a host's ranks to the host's exact top-k. Collective on the host.

        It is called before `complete`, or in it; a second call does nothing.
        """
        hosts = step.transport.hosts
        if hosts is not None and not step.is_joint:
            with step.phase("host_select"):
                exact, order = GlobalThreshold(), np.arange(hosts.within.size)
                step.selected, _ = exact.select(step.selected, step.k, order, hosts.within)
                step.threshold, step.largest = exact.ends
            step.is_joint = True

    def _join_shares(self, step: Step) -> None:
        """Select on the host, and tell the ranks with the same share how much of it each host has selected."""
        self.select_together(step)
        with step.phase("agree"):
            length, counts = len(step.selected), self.counts(step.selected, step.n, step.transport.size)
            lengths, step.counts = tell(np.array([length], np.uint32), counts, step.transport)
            step.lengths, step.share_k = lengths[:, 0].astype(np.int64), float(lengths.mean())

    def check_agreement(self, description: str, k: int, transport: CountingTransport) -> None:
        """Hold a roll call without a step. Raise AgreementError on all ranks if they differ. Collective."""
        self.agree_on_host(k, transport, description)
        nothing = SparseVector.empty(np.float32)
        counts = self.counts(nothing, 0, transport.size) if transport.hosts is None else NOTHING
        roll_call(replace(self._attendance(description, k), counts=counts), transport.everyone)

    def agree_on_host(self, k: int, transport: CountingTransport, description: str | None = None,
                      finite: bool = True) -> bool:
        """Compare the ranks of this host before they send each other anything, if each host is one worker.

        Hosts may still differ, which `complete` finds. Return True if all ranks of the host are `finite`.
        Raise AgreementError, on the ranks of all hosts.
        """
        if transport.hosts is None:
            return finite
        mine = self._attendance(self.description if description is None else description, k, finite)
        try:
            with transport.phase("host_agree"):
                return roll_call(mine, transport.hosts.within).finite
        except AgreementError:
            roll_call(mine, transport.everyone)  # the others are there, or will be
            raise

    def _attendance(self, description: str, k: int, finite: bool = True) -> Attendance:
        return Attendance(description, k, self.step, finite, sample=np.full(self.samples, np.nan, np.float32))

    # What schemes give.

    def global_k(self, k: int, n: int, size: int) -> int:
        """Return the most elements of the sum that are kept, if each of `size` ranks selects k of n: all."""
        return min(n, k * size)

    @abstractmethod
    def exchange(self, step: Step) -> StepResult:
        """Return the result with the update; if a worker is a host, with that of this rank's share."""

    def select(self, step: Step) -> SparseVector:
        """Return this rank's selection; an empty one if its acc is not finite."""
        with step.phase("select"):
            if not step.finite or not step.n:  # a share may be empty
                return SparseVector.empty(step.acc.dtype)
            step.threshold, selected = self.local_selection(step.acc, min(step.k, step.n))
            step.report.local_threshold = step.threshold  # also of a step that is skipped
            return selected

    def local_selection(self, acc: Accumulator, k: int) -> tuple[float, SparseVector]:
        """Return the threshold, and the elements that pass it: the exact top-k."""
        return local_top_k(acc, k)

    def counts(self, selected: SparseVector, n: int, size: int) -> Counts:  # noqa: ARG002
        """Return the numbers that others need before the exchange: int64, shape (m,); here the selection's length."""
        return np.array([len(selected)], np.int64)

    def is_complete(self) -> bool:
        """Return True if this rank remembers everything that a step could need of the steps before."""
        return True

    def state(self) -> dict[str, Any]:
        """Return all that a resumed run needs for the same bits: plain numbers, strings and lists."""
        return {"step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the result of `state` from the same rank of as many ranks."""
        self.step = state["step"]

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; from its step alone, if the state is of other ranks and has nothing else."""
        state = state.get("buckets", [state])[0]  # as files of earlier versions have it
        self.forget()
        self.step = state["step"]
        if state.keys() - {"step", "members"}:
            self.load_state(dict(state))

    def forget(self) -> None:
        """Forget all that depends on the ranks; the next step finds it anew."""
