"""Ok-Topk, the O(k) sparse allreduce: Algorithm 1. `docs/algorithm.md` sets it beside the paper's lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from ..errors import OptionError
from ..phases.agreement import tell
from ..phases.balance import balance_and_allgatherv, needs_balance
from ..phases.division import Division, Words, divide
from ..phases.link import Link
from ..phases.regions import count_by_region, space_repartition
from ..phases.split import split_and_reduce
from ..phases.volume import oktopk_bound
from ..selection.global_top_k import global_top_k, keep_all, top_k_by_reuse
from ..selection.selection import Selection, remainder
from ..transport.base import Counts
from ..vectors.sparse import SparseVector
from ..vectors.wire import ValueDtype
from .algorithm import Algorithm, Call, Memory, Result
from .options import FEW_WORKERS, OVERSHOOT, Scheme, Unit, check_integer, check_real, elements, is_auto

GlobalSelection = Literal["exact", "reuse"]
KEPT_OF_PARAMETERS = 32
"""Elements kept of the sum in StepAhead by default, as a multiple of a rank's selection."""


class OkTopkAllreduce(Algorithm):
    """Algorithm 1: `exchange` has lines 5 to 15. Lines 2 to 4 are `Algorithm.select`, exact at every step."""

    balance_trigger = 4.0
    """The multiple of their mean that blocks may reach before they are balanced for the allgatherv; at least 1."""

    def __init__(self, options: OkTopk, unit: Unit = "gradients") -> None:
        self.options, self.unit, self.value_dtype = options, unit, options.wire_dtype(unit)

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:
        """Run lines 5 to 15 of Algorithm 1. Collective."""
        regions = self._regions(mine, call, memory, link)  # lines 5-7
        sums = split_and_reduce(mine.sent, regions, link)  # line 8
        kept, sizes_by_region, link = self._keep(sums, mine, call, memory, regions, link)  # lines 9-12
        balances = (needs_balance(sizes_by_region, self.balance_trigger)  # and as far as the bound allows
                    and regions.fits_balanced(sizes_by_region, allowed_words(call)))
        update = balance_and_allgatherv(kept.sent, sizes_by_region, balances, regions, link)  # line 13
        reached = mine.sent.positions_in(update)  # line 14
        remembered = Memory(call.t, regions.boundaries, kept.threshold)
        return Result(update, mine.sent.indices[reached], remembered, mine.elements,  # line 15
                      remainder(mine, reached, kept), regions.is_new, balances)

    def _regions(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Division:
        """Return the regions of this step: those of the last step, while they are balanced."""
        indices, transport = mine.sent.indices, link.transport
        with transport.phase("agree"):
            if not _is_due(call, self.options.region_interval):
                assert memory.boundaries is not None
                regions = divide(memory.boundaries, indices, call.counts, transport)
                if regions.fits_regions(call.k, oktopk_bound(call.k, transport.size)):  # whatever is kept of the sum
                    return regions
            boundaries = space_repartition(indices, call.n, transport)
            _, counts = tell(np.empty(0, np.uint32), count_by_region(indices, boundaries), transport)
            return divide(boundaries, indices, counts, transport, is_new=True)

    def _keep(self, sums: SparseVector, mine: Selection, call: Call, memory: Memory, regions: Division, link: Link,
              ) -> tuple[Selection, Counts, Link]:
        """Return what this rank keeps of its sums, how many are kept of each region, and the link that carries them.

        Sums have other magnitudes than selections, so the link's format is fitted to them anew.
        """
        transport, local_threshold = link.transport, mine.threshold
        with transport.phase("global_select"):
            if call.kept >= min(call.n, call.lengths.sum()):  # there cannot be more sums
                kept, sizes_by_rank = keep_all(sums, transport, local_threshold, self.value_dtype is not None)
            elif self.options.selection == "reuse" and not _is_due(call, self.options.threshold_interval):
                assert memory.threshold is not None
                fits = partial(regions.fits, words_by_rank=allowed_words(call))
                kept, sizes_by_rank = top_k_by_reuse(
                    memory.threshold, sums, call.kept, regions.order, fits, transport, local_threshold)
            else:
                kept, sizes_by_rank = global_top_k(sums, call.kept, regions.order, transport, local_threshold)
            link, kept = link.fitted_to(kept)
            return kept, sizes_by_rank[regions.order], link

    def global_k(self, k: int, n: int, size: int) -> int:
        return self.options.global_k_of(k, n, size, self.unit)

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        """Return the number of selected elements of each region; zeros if regions are not known yet."""
        if memory.boundaries is None:
            return np.zeros(size, np.int64)
        return count_by_region(mine.elements.indices, memory.boundaries)


@dataclass(frozen=True, eq=False)
class OkTopk(Scheme):
    """Ok-Topk (Li and Hoefler, PPoPP 2022): u = Topk(Σ Topk(residual + gradient)) in at most 6k(P−1)/P words.

    Args:
        density: fraction of the elements that a rank selects at a step, in (0, 1]: k = max(1, round(density · n)),
            over all parameters together. `"auto"`: the largest whose steps take at most 5 % longer than those of
            density 1 %, found by measuring while training goes on; bits then depend on time.
        global_density: fraction of the elements that is kept of the sum, in (0, 1]: k′ = max(1,
            round(global_density · n)), and at most P·k. None: as many as each rank selects. 1.0: all that was sent,
            without a global selection. `"auto"`: in `StepAhead` all that up to 32 ranks select, elsewhere as many as
            each. More is better for accuracy, above all on many ranks, and costs words: at most (2k + 4k′)(P−1)/P if
            k′ ≥ k. If the density is changed later, k′ keeps its ratio to k.
        selection: `"exact"`: the global top-k is exact at every step, as the local one always is. `"reuse"`: the
            paper's way, which reuses the global threshold between evaluations, and saves one short message.
        value_dtype: `"bfloat16"`: values travel in 16 bits. `"log4"`: in 4, a sign and one of eight magnitudes. None:
            unchanged. `"auto"`: in `StepAhead` `"log4"`, elsewhere unchanged. Rounding errors stay in the residual.
        threshold_interval: τ′, steps between exact evaluations of the global threshold, if it is reused.
        region_interval: τ, steps between repartitions of the index space.
        transport: `"mpi"` (mpi4py), `"horovod"` (Horovod's own alltoall and allgather), or `"auto"`: MPI if Horovod
            runs on it, and Horovod's collectives if not.
        hierarchical: True: each host is one worker. Its ranks add up their gradients, keep a slice of the residual
            each, and send the selected elements once; every host needs as many ranks. A number: that many consecutive
            ranks count as a host. False: each rank is a worker.

    Raises:
        OptionError: A value is not allowed.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=OkTopk(density=0.01))
    """

    selection: GlobalSelection = "exact"
    global_density: float | Literal["auto"] | None = "auto"
    value_dtype: ValueDtype | Literal["auto"] | None = "auto"
    threshold_interval: int = 32
    region_interval: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("selection", get_args(GlobalSelection)),
                              ("value_dtype", (None, "auto", *get_args(ValueDtype)))):
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")
        if self.global_density is not None and not is_auto(self.global_density):
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
        kept = self._given_global_density
        if kept is None:
            wanted = self._default_multiple(unit) * k
        elif k == elements(self._first_density, n):
            wanted = elements(kept, n)
        else:  # the density has changed
            wanted = elements(kept / self._first_density, k)
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

    def settings_but_density(self) -> Mapping[str, Any]:
        """Return the options that a change of the density leaves unchanged; a global density as a multiple of it."""
        kept = self._given_global_density
        if kept is None:
            return super().settings_but_density()
        multiple = f"{kept / self._first_density:.6g} times the density"
        return {**super().settings_but_density(), "global_density": multiple}

    def overshoot_of_p(self, workers: int) -> float:
        """Return 0 for a few workers, with whom it gains nothing."""
        return OVERSHOOT if workers > FEW_WORKERS else 0.0

    def algorithm(self, unit: Unit = "gradients") -> OkTopkAllreduce:
        """Return the algorithm with these options."""
        return OkTopkAllreduce(self, unit)


def allowed_words(call: Call) -> Words:
    """Return the words that each rank may send, by Equation 3.

    Of 2(k + 2k')(P-1)/P words, a rank that has selected k elements may send up to 2k in phase 1. The rest is for
    phase 2, the same for every rank. So a rank that has selected `lengths` elements (of a host's slice, for example)
    may send 2 lengths + rest.
    """
    rest = oktopk_bound(call.k_as_kept, len(call.lengths), call.kept) - 2 * call.k_as_kept
    return 2 * call.lengths + rest


def _is_due(call: Call, interval: int) -> bool:
    """Return True if what ranks remember is to be found anew: every `interval` steps, or as they differ in it."""
    return not call.in_sync or (call.t - 1) % interval == 0
