"""The reduction of one model's gradients, step after step: what every integration has in common.

An integration says where gradients lie (a Layout), hands them over as pieces, bucket by bucket, and writes the
sparse updates that it gets back into its framework's tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, NoReturn

import numpy as np

from ..errors import PluginError
from ..schemes.base import Scheme
from ..schemes.report import StepReport, sum_of_phases
from ..schemes.step_result import StepResult
from ..selection.accumulator import ResidualAccumulator
from ..transport.connect import Network
from ..transport.counting import CountingTransport
from ..vectors.sparse import DenseVector, SparseVector, Values
from .bucket_trial import BucketTrial, Sample
from .buckets import Bucket, Buckets, L, split
from .connection import Connection
from .host_accumulator import HostAccumulator
from .state import THIS_PROCESS, Record, Unit, check_residuals, record, share_of

logger = logging.getLogger("horovod_oktopk")

Update = SparseVector | DenseVector
Piece = tuple[int, Any]
"""(offset, flat array on the accumulator's device)."""


class FlatReducer(Generic[L]):
    """Reduces the gradients of one layout over the ranks of a network; one object on each rank.

    A step is `reduce` for every bucket, in order, and then `finish`: no residual changes before all buckets are
    known to be finite on all ranks.

    average: whether the sum is divided by the number of ranks. make_accumulator: for a bucket's layout.
    signature: lines that must be equal on all ranks, "name: value"; the layout's description if not given.
    order: the gradients in the order in which they become ready; from last to first if not given.
    Raises OptionError where the options ask for more elements than there are.
    """

    unit: Unit = "gradients"
    copies, adds = 1, True

    def __init__(self, options: Scheme, average: bool, layout: L,
                 make_accumulator: Callable[[L], ResidualAccumulator], network: Network,
                 signature: Sequence[str] | None = None, order: Sequence[int] | None = None) -> None:
        self.options = options
        self.layout = layout
        self.network = network
        self.report: StepReport | None = None
        self.residual_scale: float | None = None
        """The loss scale that the residual's unit holds; None where gradients are not scaled."""
        self._average = average
        self._signature = layout.describe() if signature is None else signature
        self._order = list(range(len(layout.entries)))[::-1] if order is None else list(order)
        self._connection = Connection(network, options.transport, options.hierarchical, self._subject)
        self._scale: float | None = None
        self._results: list[StepResult] = []
        self._before: dict[str, Any] | None = None
        options.k_of(max(1, layout.n))
        self.buckets = Buckets(layout, options, self._share_of_host if options.hierarchical else make_accumulator,
                               split(layout, self._order, options.bucket_bytes))
        self.trial: BucketTrial | None = None
        """Where bucket_bytes is "auto": it finds the best buckets."""
        self._begin_trial()
        self._describe()

    # A step.

    def reduce(self, index: int, pieces: Iterable[Piece], scale: float | None = None, clear: bool = False,
               others_finite: bool = True) -> None:
        """Reduces one bucket, for `finish`. All ranks take the buckets in the same order, from the first.

        pieces: this rank's gradients of the bucket; they may change afterwards. scale: the loss scale that they hold.
        clear: leaves zeros in pieces of the layout's dtype, so that `finish`'s update can be written there.
        others_finite: whether all is finite that this rank reduces in this step by other means (sparse gradients): if
        not, the roll call tells all ranks, and the step changes nothing.
        Where an earlier bucket of this step failed, or is not finite, nothing is done.
        Raises AgreementError where the ranks differ, TransportError where communication fails.
        """
        if index == 0:
            self.connect()
            self._undo()  # a step that was begun and not finished
            self._results, self._scale, self._before = [], scale, self.buckets.state()
        elif len(self._results) < index or not self._results[-1].report.finite:
            return
        transport, bucket = self._transport, self.buckets[index]
        transport.reset()
        if bucket.layout.n == 0:
            self._results.append(self._reduce_nothing(bucket, others_finite))
            return
        k = self.options.k_of(bucket.layout.n)
        bucket.algorithm.agree_on_host(k, transport)
        with transport.phase("accumulate"):
            ratio = scale / self.residual_scale if scale and self.residual_scale else 1.0
            finite = bucket.accumulator.accumulate(pieces, ratio, clear)
        self._results.append(bucket.algorithm.reduce(bucket.accumulator, k, finite and others_finite, transport,
                                                     whole=bucket.layout.n))

    def _share_of_host(self, layout: L) -> HostAccumulator:
        return HostAccumulator(layout.n, layout.dtype, lambda: self._connection.hosts)

    def _reduce_nothing(self, bucket: Bucket[L], finite: bool) -> StepResult:
        finite = self.check_agreement(bucket.algorithm.description, finite)
        report = StepReport(step=bucket.algorithm.step, n=0, k=0, phases=self._transport.phases, finite=finite)
        update = SparseVector.empty(bucket.layout.dtype) if finite else None
        return StepResult(update, np.empty(0, np.int64), report)

    def finish(self) -> list[Update] | None:
        """The buckets' updates; None where one is not finite on every rank: then nothing has changed."""
        self.report = StepReport.of_buckets([result.report for result in self._results])
        with self.writing():
            updates = self._updates()
            if updates is None:
                self._undo()
                self.report.finite, self.report.n = False, self.layout.n
                self._report_all_k(self.report)
                return None
            self._before = None
            for bucket, result in zip(self.buckets, self._results, strict=True):
                if bucket.layout.n:
                    self._commit(bucket, result)
            self.residual_scale = self._scale or self.residual_scale
        return updates

    def _report_all_k(self, report: StepReport) -> None:
        """Of all buckets, as a step that is not finite may have skipped some."""
        report.k = report.global_k = 0
        for bucket in self.buckets:
            if n := bucket.layout.n:
                k = self.options.k_of(n)
                report.k += k
                report.global_k += bucket.algorithm.global_k(k, n, self._transport.size)

    def _commit(self, bucket: Bucket[L], result: StepResult) -> None:
        bucket.accumulator.commit(result.contributed, result.remainder)

    def _undo(self) -> None:
        if self._before is not None:
            self.buckets.undo(self._before)
            self._before = None

    def _updates(self) -> list[Update] | None:
        updates = []
        for bucket, result in zip(self.buckets, self._results, strict=False):
            update = result.update
            if update is not None and self._average:
                update = update.divided(self._transport.everyone.size)
            if update is None or not bucket.layout.representable(update):
                return None
            updates.append(update)
        return updates

    @property
    def last_report(self) -> StepReport | None:
        """Of the last step; None before the first."""
        return self.report

    def writing(self) -> AbstractContextManager[None]:
        """What happens inside counts as the step's write-back."""
        return self._reported("write_back")

    @contextmanager
    def _reported(self, phase: str) -> Iterator[None]:
        """What happens inside is added to the last step's report, which shares nothing with the transport."""
        assert self.report is not None
        self._transport.reset()
        with self._transport.phase(phase):
            yield
        self.report.phases = sum_of_phases([self.report.phases, self._transport.phases])
        self._transport.reset()

    def refuse(self, signature: Sequence[str], message: str) -> NoReturn:
        """Raises PluginError for a step that cannot be taken; the ranks that do take it raise AgreementError.

        signature: of the gradients at hand.
        """
        self.connect()
        self.check_agreement(self._description(signature))
        raise PluginError(message)

    # Which buckets, and how much of them: changed between steps, on all ranks together.

    def set_density(self, density: float | None) -> None:
        """From the next step on, another fraction of the elements is selected; None: that of the options again.

        Raises OptionError for a density that is not allowed, and where k was given as a number.
        """
        before, self.options = self.options.density, self.options.with_density(density)
        if self.options.density != before:
            self._begin_trial()
        self._describe()

    def learn(self, sample: Sample) -> None:
        """After a step: takes note of its times where a trial is on, and other buckets where they promise more."""
        assert self.report is not None
        if self.is_trying and self.report.finite:  # as all ranks know
            assert self.trial is not None
            with self._reported("trial"):
                partition = self.trial.learn(sample, self._transport.everyone)
            if partition is not None:
                self._split_anew(partition)
                self._describe()

    @property
    def is_trying(self) -> bool:
        """Whether a trial is on, and wants a sample of every step."""
        return self.trial is not None and not self.trial.over

    def _begin_trial(self) -> None:
        if self.options.bucket_bytes == "auto":
            self.trial = BucketTrial(self.layout, self._order)
            self._split_anew(split(self.layout, self._order, None))

    def _split_anew(self, partition: Sequence[tuple[int, ...]]) -> None:
        """Other buckets, with the same residual."""
        if self.buckets.partition != partition:
            state, residual = self.buckets.state(), self.buckets.read_residual()
            self.buckets.split(list(partition))
            self.buckets.load_state(state)
            self.buckets.load_residual(residual)

    # The state.

    def read_residual(self) -> Values:
        """A copy of this rank's residual: NumPy, shape (n,), in the layout's order."""
        return self.buckets.read_residual()

    def record(self) -> Record:
        """This rank's residual (a copy, NumPy) and counters, as `load` takes them: of the last finished step."""
        return record(*self.network.membership()[:2], self.layout, self.read_residual(), self.residual_scale,
                      self._before or self.buckets.state())

    def load(self, records: Sequence[Record]) -> None:
        """Takes this rank's share of the records that `record` gave on these or other ranks; none starts anew."""
        check_residuals(records)
        self.take(share_of(records, *self.network.membership()[:2], self.layout, process=THIS_PROCESS))

    def take(self, share: Record) -> None:
        """Takes what `share_of` has worked out for this rank."""
        self._before = None
        self.buckets.load_state(share["algorithm"])
        self.buckets.load_residual(share["residual"])
        self.residual_scale = share["residual_scale"]

    # The ranks.

    @property
    def description(self) -> str:
        """What must be equal on all ranks, as the first bucket's roll call has it."""
        return self.buckets[0].algorithm.description

    def _subject(self) -> str:
        """What is reduced, for the log."""
        several = f" in {len(self.buckets)} buckets" if len(self.buckets) > 1 else ""
        k = sum(self.options.k_of(bucket.layout.n) for bucket in self.buckets if bucket.layout.n)
        return f"{self._name}: {self.layout.summary(k)}{several}"

    @property
    def _name(self) -> str:
        """Of the compression."""
        return type(self.options).__name__

    def _describe(self) -> None:
        for index, bucket in enumerate(self.buckets):
            bucket.algorithm.description = self._description([*self._signature, *self.buckets.describe(index)])

    def _description(self, signature: Sequence[str]) -> str:
        settings = [f"{name}: {value}" for name, value in self.options.settings().items()]
        return "\n".join([f"compression: {type(self.options).__name__}", *settings,
                          f"op: {'Average' if self._average else 'Sum'}", *signature])

    @property
    def is_connected(self) -> bool:
        """Whether there is a transport, and to the ranks that there are now."""
        return self._connection.is_current

    def reset_if_membership_changed(self) -> None:
        """Before a step: where elastic training has changed who the ranks are, forgets what depends on them."""
        if self._connection.lost():
            self._before = None
            self._begin_trial()
            self._describe()
            for bucket in self.buckets:
                bucket.algorithm.forget()

    def connect(self) -> CountingTransport:
        """The transport to all ranks; a new one where elastic training has changed who they are."""
        self.reset_if_membership_changed()
        return self._connection.connect(self.description, self._first_k).everyone

    @property
    def _transport(self) -> CountingTransport:
        return self._connection.transport

    def leave(self) -> None:
        """After the transport was used for other ends than a step; on all ranks together."""

    def check_agreement(self, description: str, finite: bool = True) -> bool:
        """A roll call alone; whether it is `finite` on all ranks."""
        return self.buckets[0].algorithm.check_agreement(description, self._first_k, self._transport, finite)

    @property
    def _first_k(self) -> int:
        """k of the first bucket."""
        n = self.buckets[0].layout.n
        return self.options.k_of(n) if n else 0
