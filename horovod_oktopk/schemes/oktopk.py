"""Algorithm 1, O(k) sparse allreduce: the conductor. `docs/algorithm.md` sets it beside the paper's lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..kernels.half_precision import HalfDtype
from ..phases.agreement import RollCall, roll_call
from ..phases.balance_gather import allgatherv, balance, needs_balance, plan_balance, ring_elements
from ..phases.regions import owner_rotation, space_repartition
from ..phases.split_reduce import split_and_reduce
from ..selection.accumulator import Accumulator
from ..selection.local_top_k import local_top_k
from ..selection.threshold_reuse import ReusedThreshold
from ..vectors.sparse import Indices, SparseVector, sum_of
from ..vectors.wire import WireCodec
from .cost import oktopk_bound
from .report import StepReport
from .step_result import StepResult

if TYPE_CHECKING:
    from ..transport.counting import CountingTransport

Selection = Literal["exact", "reuse"]


class OkTopkAllreduce:
    """The O(k) sparse allreduce of one flat vector over the steps; one object on each rank.

    description: what must be equal on all ranks, one "name: value" a line.
    The other arguments are those of `options.OkTopk`, which documents them.
    """

    def __init__(self, description: str, selection: Selection = "exact", value_dtype: HalfDtype | None = None,
                 threshold_interval: int = 32, region_interval: int = 64, messages_in_flight: int = 8,
                 balance_trigger: float = 4.0, threshold_guard: float = 0.25) -> None:
        self.description = description
        self.selection = selection
        self.value_dtype = value_dtype
        self.threshold_interval = threshold_interval
        self.region_interval = region_interval
        self.messages_in_flight = messages_in_flight
        self.balance_trigger = balance_trigger
        self.step = 0
        self.global_ = ReusedThreshold(threshold_guard)
        self.boundaries: Indices | None = None

    def reduce(self, acc: Accumulator, k: int, finite: bool, transport: CountingTransport) -> StepResult:
        """One step, t = self.step + 1. The caller commits `contributed` to acc, or drops the step.

        finite: whether this rank's acc is. Raises AgreementError or TransportError, on every rank.
        """
        t = self.step + 1
        report = StepReport(step=t, n=acc.n, k=k, phases=transport.phases)
        self._reset_if_size_changed(transport.size)
        selected = self._select(acc, k, finite, report, transport)
        call = self._roll_call(selected, k, finite, transport)
        return self._reduce_agreed(selected, k, call, acc.n, report, transport)

    def _select(self, acc: Accumulator, k: int, finite: bool, report: StepReport,
                transport: CountingTransport) -> SparseVector:
        with transport.phase("select"):  # lines 2-4
            if not finite:
                return SparseVector.empty(acc.dtype)
            report.local_threshold, selected = local_top_k(acc, k)
            return selected

    def _reduce_agreed(self, selected: SparseVector, k: int, call: RollCall, n: int, report: StepReport,
                       transport: CountingTransport) -> StepResult:
        if not call.finite:
            report.finite = False
            return StepResult(None, np.empty(0, np.int64), report)
        codec = self._codec(selected.values.dtype)
        selection = codec.round(selected)
        with transport.phase("agree"):
            t = report.step = call.step + 1
            counts = self._regions(selection, k, t, call, report, n, transport)  # lines 5-7
        assert self.boundaries is not None
        rotation = owner_rotation(counts)
        region_order = (np.arange(transport.size) + rotation) % transport.size
        with transport.phase("split_and_reduce"):  # line 8
            reduced = split_and_reduce(selection, self.boundaries, counts, rotation, self.messages_in_flight, codec,
                                       transport)
        volume = _Volume(counts, region_order, k)
        with transport.phase("global_select"):  # lines 9-12
            summed, sizes = self._select_globally(reduced, k, t, call.in_sync, n, volume, transport)
            chosen = codec.round(summed)
        # Line 13.
        update = self._balance_and_allgatherv(chosen, sizes[region_order], volume, codec, report, transport)
        sent = selection.positions_in(update)  # line 14
        self.step = t
        report.local_selected, report.global_selected = len(selection), len(update)
        report.global_threshold = self.global_.value or 0.0
        remainder = None if codec.value_dtype is None else sum_of(
            [selected.take(sent).minus(selection.take(sent)), summed.minus(chosen)])
        return StepResult(update, selection.indices[sent], report, remainder)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same bits: plain numbers and lists."""
        return {"step": self.step, "global_threshold": self.global_.value,
                "boundaries": None if self.boundaries is None else self.boundaries.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what `state` gave on the same rank of as many ranks."""
        self.step = state["step"]
        self.global_.value = state["global_threshold"]
        boundaries = state["boundaries"]
        self.boundaries = None if boundaries is None else np.array(boundaries, np.int64)

    def forget(self) -> None:
        """Drops what depends on who the ranks are: threshold and boundaries; the next step re-evaluates them."""
        self.global_.value = self.boundaries = None

    def _reset_if_size_changed(self, size: int) -> None:
        if self.boundaries is not None and len(self.boundaries) != size + 1:
            self.forget()

    def _codec(self, dtype: Any) -> WireCodec:
        return WireCodec(dtype, self.value_dtype)

    def _roll_call(self, selected: SparseVector, k: int, finite: bool, transport: CountingTransport) -> RollCall:
        with transport.phase("agree"):
            return roll_call(transport, self.description, k, self.step, finite, self._state_code(),
                             self._counts(selected, transport.size))

    def _state_code(self) -> int:
        """For the roll call; 0 where nothing is remembered."""
        return int(self.boundaries is not None and self.global_.value is not None)

    def _counts(self, selected: SparseVector, size: int) -> NDArray[np.int64]:
        """Elements by region, int64, shape (P,)."""
        if self.boundaries is None:
            return np.zeros(size, np.int64)
        return np.diff(np.searchsorted(selected.indices, self.boundaries))

    def _regions(self, selection: SparseVector, k: int, t: int, call: RollCall, report: StepReport, n: int,
                 transport: CountingTransport) -> NDArray[np.int64]:
        """Settles the boundaries, and returns everyone's elements by region: int64, shape (P, P)."""
        if call.in_sync and not _due(t, self.region_interval) and _is_balanced(call.counts, k):
            return call.counts
        report.repartitioned = True
        self.boundaries = space_repartition(selection.indices, n, transport)
        return transport.allgather(self._counts(selection, transport.size))

    def _select_globally(self, reduced: SparseVector, k: int, t: int, in_sync: bool, n: int, volume: _Volume,
                         transport: CountingTransport) -> tuple[SparseVector, NDArray[np.int64]]:
        """This rank's share of the global top-k, and how many elements each rank's has."""
        reusable = in_sync and k < n and not _due(t, self.threshold_interval)  # with k = n all is to be sent
        if self.selection == "reuse" and reusable:
            return self.global_.select_again(reduced, k, volume.region_order, volume.fits_direct, transport)
        return self.global_.select(reduced, k, volume.region_order, transport)

    def _balance_and_allgatherv(self, chosen: SparseVector, sizes: NDArray[np.int64], volume: _Volume,
                                codec: WireCodec, report: StepReport, transport: CountingTransport) -> SparseVector:
        assert self.boundaries is not None
        plan = plan_balance(sizes)
        ranges = self.boundaries[:-1], self.boundaries[1:]
        if needs_balance(sizes, self.balance_trigger) and volume.fits_balanced(sizes):
            report.balanced = True
            with transport.phase("balance"):
                chosen = balance(chosen, plan, self.boundaries, volume.region_order, self.messages_in_flight, codec,
                                 transport)
            sizes, ranges = np.diff(plan.after), plan.ranges(self.boundaries)
        with transport.phase("allgatherv"):
            return allgatherv(chosen, sizes, ranges, volume.region_order, codec, transport)


@dataclass(frozen=True)
class _Volume:
    """Words that every position sends in this step, to be held against the bound of Equation 3.

    All ranks know all the numbers, so all decide alike.
    """

    counts: NDArray[np.int64]
    region_order: NDArray[np.int64]
    k: int

    def fits_direct(self, sizes: NDArray[np.int64]) -> bool:
        """Whether an allgatherv without balancing keeps to the bound; sizes: elements by rank."""
        return self._fits(ring_elements(sizes[self.region_order], self.region_order))

    def fits_balanced(self, sizes: NDArray[np.int64]) -> bool:
        """Whether balancing and allgatherv keep to it; sizes: elements by position."""
        plan = plan_balance(sizes)
        moved = sizes - np.diagonal(plan.moves)
        return self._fits(moved + ring_elements(np.diff(plan.after), self.region_order))

    def _fits(self, gathered: NDArray[np.int64]) -> bool:
        rows = self.counts[self.region_order]
        split = rows.sum(axis=1) - np.diagonal(rows)
        return bool((2 * (split + gathered)).max() <= oktopk_bound(self.k, len(gathered)))


def _due(t: int, interval: int) -> bool:
    return (t - 1) % interval == 0


def _is_balanced(counts: NDArray[np.int64], k: int) -> bool:
    """Whether each owner receives so little that, with all of u, it keeps to the bound of Equation 3."""
    size = len(counts)
    regions = (np.arange(size) - owner_rotation(counts)) % size
    received = counts.sum(axis=0)[regions] - counts[np.arange(size), regions]
    limit = max(oktopk_bound(k, size) / 2 - k, k) + size
    return bool(received.max() <= limit)
