"""Ok-Topk, the O(k) sparse allreduce: Algorithm 1. `docs/algorithm.md` sets it beside the paper's lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..phases.agreement import tell
from ..phases.exchange import (
    BalancePlan,
    Bound,
    Division,
    SparseTransport,
    divide,
    needs_balance,
    oktopk_bound,
    split_and_reduce,
)
from ..phases.regions import Regions, count_by_region, space_repartition
from ..selection.global_top_k import GlobalThreshold
from ..transport.base import Counts
from ..transport.counting import Hosts
from ..vectors.sparse import Indices, SparseVector, concatenate, sum_of
from ..vectors.wire import ValueDtype
from .algorithm import Algorithm, Step
from .base import Scheme, Unit, check_integer, check_real, elements
from .report import StepResult

Selection = Literal["exact", "reuse"]
KEPT_OF_PARAMETERS = 32
"""Elements kept of the sum in StepAhead by default, as a multiple of a rank's selection."""


@dataclass(frozen=True, eq=False)
class OkTopk(Scheme):
    """Ok-Topk (Li and Hoefler, PPoPP 2022): u = Topk(Σ Topk(residual + gradient)) in at most 6k(P−1)/P words.

    Args:
        density: share of the elements that a rank selects at a step, in (0, 1]: k = max(1, round(density · n)), over
            all parameters together.
        global_density: share of the elements that is kept of the sum, in (0, 1]: k′ = max(1, round(global_density ·
            n)), and at most P·k. None: as many as each rank selects. 1.0: all that was sent, without a global
            selection. `"auto"`: in `StepAhead` all that up to 32 ranks select, elsewhere as many as each. More is
            better for accuracy, above all on many ranks, and costs words: at most (2k + 4k′)(P−1)/P if k′ ≥ k. If the
            density is changed later, k′ keeps its ratio to k.
        selection: `"exact"`: the global top-k is exact at every step, as the local one always is. `"reuse"`: the
            paper's way, which reuses the global threshold between evaluations, and saves one short message.
        value_dtype: `"bfloat16"`: values travel in 16 bits. `"log4"`: in 4, a sign and one of eight magnitudes. None:
            unchanged. `"auto"`: in `StepAhead` `"log4"`, elsewhere unchanged. Rounding errors stay in the residual.
        threshold_interval: τ′, steps between exact evaluations of the global threshold, if it is reused.
        region_interval: τ, steps between repartitions of the index space.
        transport: `"mpi"` (mpi4py), `"horovod"` (Horovod's own alltoall and allgather), or `"auto"`: MPI if Horovod
            runs on it, and Horovod's collectives if not.
        hierarchical: True: each host is one worker. Its ranks add up their gradients, keep a share of the residual
            each, and send the selected elements once; every host needs as many ranks. A number: that many consecutive
            ranks count as a host. False: each rank is a worker.

    Raises:
        OptionError: A value is not allowed.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=OkTopk(density=0.01))
    """

    serves_hosts: ClassVar[bool] = True

    selection: Selection = "exact"
    global_density: float | Literal["auto"] | None = "auto"
    value_dtype: ValueDtype | Literal["auto"] | None = "auto"
    threshold_interval: int = 32
    region_interval: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("selection", get_args(Selection)),
                              ("value_dtype", (None, "auto", *get_args(ValueDtype)))):
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")
        if self.hierarchical and self.selection == "reuse":
            raise OptionError("hierarchical works with selection='exact' only; got selection='reuse', "
                              f"hierarchical={self.hierarchical!r}: leave one of the two out")
        if self.global_density not in (None, "auto"):
            check_real("global_density", self.global_density, 'in (0, 1], None or "auto"', lambda x: 0 < x <= 1)
        for name in ("threshold_interval", "region_interval"):
            check_integer(name, getattr(self, name))

    def wire_dtype(self, unit: Unit = "gradients") -> ValueDtype | None:
        """Return the format of the values that are sent; None: their own dtype."""
        if self.value_dtype == "auto":
            return "log4" if unit == "parameters" else None
        return self.value_dtype

    def global_k_of(self, k: int, n: int, size: int, unit: Unit = "gradients") -> int:
        """Return k', the number of elements to keep of the sum, if each of `size` ranks selects k of n."""
        kept, given = self._given_global_density, self._given_density
        if kept is None:
            wanted = self._default_multiple(unit) * k
        elif k == elements(given, n):
            wanted = elements(kept, n)
        else:  # the density has changed
            wanted = elements(kept / given, k)
        return min(wanted, n, k * size)

    @property
    def _given_global_density(self) -> float | None:
        """The global density that was given; None if it is a multiple of the density."""
        return None if self.global_density is None or self.global_density == "auto" else float(self.global_density)

    def _default_multiple(self, unit: Unit) -> int:
        return KEPT_OF_PARAMETERS if self.global_density == "auto" and unit == "parameters" else 1

    def settings(self, unit: Unit = "gradients") -> Mapping[str, Any]:
        """Return all options by name; a global density with its original density, as k' follows from both."""
        kept = self._given_global_density
        said = (f"{self._default_multiple(unit)} times the density" if kept is None
                else f"{kept} at density {self._given_density}")
        return {**super().settings(unit), "global_density": said, "value_dtype": self.wire_dtype(unit)}

    def kind(self) -> Mapping[str, Any]:
        """Return the options that a change of the density leaves unchanged; a global density as a multiple of it."""
        kept = self._given_global_density
        if kept is None:
            return super().kind()
        return {**super().kind(), "global_density": f"{kept / self._given_density:.6g} times the density"}

    def algorithm(self, unit: Unit = "gradients") -> OkTopkAllreduce:
        """Return the algorithm with these options."""
        return OkTopkAllreduce(self, unit)


class OkTopkAllreduce(Algorithm):
    """Algorithm 1. Regions and the global threshold are remembered from step to step."""

    balance_trigger = 4.0
    """The multiple of their mean that blocks may reach before they are balanced for the allgatherv; at least 1."""

    def __init__(self, options: OkTopk, unit: Unit) -> None:
        self.options, self.unit = options, unit
        self.global_ = GlobalThreshold()
        self.boundaries: Indices | None = None

    def exchange(self, step: Step) -> StepResult:
        """Run lines 5 to 15 of the paper's Algorithm 1; lines 2 to 4 have selected before."""
        sparse = step.sparse_transport(self.options.wire_dtype(self.unit))
        selection = sparse.codec.round(step.selected)
        with step.phase("agree"):
            regions = self._divide(selection.indices, step)  # lines 5-7
        with step.phase("split_and_reduce"):
            reduced = split_and_reduce(selection, regions, sparse)  # line 8
        bound: Bound = oktopk_bound(step.share_k, step.transport.size, step.report.global_k)
        with step.phase("global_select"):
            summed, sizes = self._select_globally(reduced, step, regions, bound)  # lines 9-12
            if step.transport.hosts is not None:
                bound = _share_bound(sizes, step, step.transport.hosts)
                sizes = sizes[step.transport.hosts.group]
            sparse = replace(sparse, codec=sparse.codec.spanning(*self.global_.ends))
            chosen = sparse.codec.round(summed)
        balances = needs_balance(sizes, self.balance_trigger) and regions.fits_balanced(sizes[regions.order], bound)
        update = self._gather(chosen, sizes[regions.order], balances, step, regions, sparse)  # line 13
        sent = selection.positions_in(update)  # line 14
        step.report.global_threshold = self.global_.value or 0.0
        remainder = None if sparse.codec.value_dtype is None else sum_of(
            [step.selected.take(sent).minus(selection.take(sent)), summed.minus(chosen)])
        return step.result(update, selection.indices[sent], remainder)

    def _divide(self, selected: Indices, step: Step) -> Division:
        """Return the regions of this step: those of the last step, while they are balanced."""
        rotates = step.transport.hosts is None  # a host's ranks do not know who owns what in other shares
        if step.call.in_sync and not _due(step.t, self.options.region_interval):
            assert self.boundaries is not None
            regions = divide(self.boundaries, selected, step.counts, step.transport, rotates)
            if regions.fits_regions(step.share_k, oktopk_bound(step.share_k, step.transport.size)):
                return regions
        step.report.repartitioned = True
        self.boundaries = space_repartition(selected, step.n, step.transport)
        _, counts = tell(np.empty(0, np.uint32), count_by_region(selected, self.boundaries), step.transport)
        return divide(self.boundaries, selected, counts, step.transport, rotates)

    def _select_globally(self, reduced: SparseVector, step: Step, regions: Division, bound: Bound,
                         ) -> tuple[SparseVector, Counts]:
        """Return this rank's share of the global top-k, and the length of each rank's share, of all ranks."""
        hosts, everyone, kept = step.transport.hosts, step.transport.everyone, step.report.global_k
        order, weight = regions.order, None
        if hosts is not None:
            order = hosts.grid.T.ravel()
            weight = step.share_k * hosts.within.size / step.k  # as in what hosts select, so in their sum
        if kept >= min(step.report.n, step.k * step.transport.size):
            return self.global_.select_all(reduced, everyone, step.threshold)
        if (self.options.selection == "reuse" and step.call.in_sync
                and not _due(step.t, self.options.threshold_interval)):
            fits = partial(regions.fits, bound=bound)
            return self.global_.select_again(reduced, kept, order, fits, everyone, step.threshold)
        return self.global_.select(reduced, kept, order, everyone, step.threshold, weight)

    @staticmethod
    def _gather(chosen: SparseVector, sizes: Counts, balances: bool, step: Step, regions: Regions,
                sparse: SparseTransport) -> SparseVector:
        """Return the whole update. sizes: elements by region. balances: True if blocks are made equal before."""
        extents = regions.extents(sizes)
        if balances:
            step.report.balanced = True
            plan = BalancePlan(sizes)
            with step.phase("balance"):
                parts = sparse.exchange(chosen, *plan.routes(regions, step.transport.rank))
                chosen = concatenate(parts, sparse.codec.dtype)
            extents = plan.extents(regions.boundaries)
        with step.phase("allgatherv"):
            shares = sparse.allgatherv(chosen, list(zip(regions.order.tolist(), extents, strict=True)))
            return concatenate(shares, sparse.codec.dtype)

    # What is remembered.

    def global_k(self, k: int, n: int, size: int) -> int:
        return self.options.global_k_of(k, n, size, self.unit)

    def select(self, step: Step) -> SparseVector:
        if self.boundaries is not None and len(self.boundaries) != step.transport.size + 1:
            self.forget()  # the job had another number of ranks
        return super().select(step)

    def counts(self, selected: SparseVector, n: int, size: int) -> Counts:  # noqa: ARG002
        """Return the number of selected elements of each region; zeros if regions are not known yet."""
        if self.boundaries is None:
            return np.zeros(size, np.int64)
        return count_by_region(selected.indices, self.boundaries)

    def is_complete(self) -> bool:
        return self.boundaries is not None and self.global_.value is not None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "global_threshold": self.global_.value,
                "boundaries": None if self.boundaries is None else self.boundaries.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.global_.value = state["global_threshold"]
        boundaries = state["boundaries"]
        self.boundaries = None if boundaries is None else np.array(boundaries, np.int64)

    def forget(self) -> None:
        self.global_.value = self.boundaries = None


def _due(t: int, interval: int) -> bool:
    return (t - 1) % interval == 0


def _share_bound(sizes: Counts, step: Step, hosts: Hosts) -> NDArray[np.float64]:
    """Return the words that each host may send of this share, to keep to its bound whatever other shares do; by host.

    Of its bound each host needs two words for each selected element. The rest is divided among the shares
    in proportion to the kept elements. It must be at least two words for each, as much as an allgatherv takes;
    otherwise nothing fits. On two hosts the bound is not Ok-Topk's, as regions do not rotate.
    sizes: elements kept, by rank.
    """
    k, kept = step.k, step.report.global_k
    each = (max(oktopk_bound(k, step.transport.size, kept), 2 * (k + kept)) - 2 * k) / max(int(sizes.sum()), 1)
    if each < 2:
        return np.zeros(step.transport.size)
    bound: NDArray[np.float64] = 2 * step.lengths + each * sizes[hosts.group].sum()
    return bound
