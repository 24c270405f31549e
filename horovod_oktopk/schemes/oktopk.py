"""Ok-Topk, the O(k) sparse allreduce: Algorithm 1. `docs/algorithm.md` sets it beside the paper's lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

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


class OkTopkAllreduce(Algorithm):
    """Algorithm 1: `exchange` has lines 5 to 15. Lines 2 to 4 are `Algorithm.select`, exact at every step.

    Args:
        global_k: returns k' for (k, n, P); see `Algorithm.global_k`.
        value_dtype: the format of the values that are sent.
        reuses: True if the global threshold is reused.
        threshold_interval: τ′, steps between exact evaluations of the global threshold, if it is reused.
        region_interval: τ, steps between repartitions of the index space.
    """

    balance_trigger = 4.0
    """The multiple of their mean that blocks may reach before they are balanced for the allgatherv; at least 1."""

    def __init__(self, global_k: Callable[[int, int, int], int], value_dtype: ValueDtype | None, reuses: bool,
                 threshold_interval: int, region_interval: int) -> None:
        self._global_k, self.value_dtype, self.reuses = global_k, value_dtype, reuses
        self.threshold_interval, self.region_interval = threshold_interval, region_interval

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:
        """Run lines 5 to 15 of Algorithm 1. Collective."""
        regions = self._regions(mine, call, memory, link)  # lines 5-7
        sums = split_and_reduce(mine.sent, regions, link)  # line 8
        kept, sizes_by_region, link = self._keep(sums, mine, call, memory, regions, link)  # lines 9-12
        balances = self._balances(sizes_by_region, call, regions)
        update = balance_and_allgatherv(kept.sent, sizes_by_region, balances, regions, link)  # line 13
        reached = mine.sent.positions_in(update)  # line 14
        remembered = Memory(call.t, regions.boundaries, kept.threshold)
        return Result(update, mine.sent.take(reached).indices, remembered, mine.elements,  # line 15
                      remainder(mine, reached, kept), regions.is_new, balances)

    def _regions(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Division:
        """Return the regions of this step: those of the last step, while they are balanced."""
        indices, transport = mine.sent.indices, link.transport
        with transport.phase("agree"):
            if call.in_sync and not _is_due(call.t, self.region_interval):
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
        transport, floor = link.transport, mine.threshold
        with transport.phase("global_select"):
            if call.kept >= min(call.n, call.lengths.sum()):  # there cannot be more sums
                kept, sizes_by_rank = keep_all(sums, transport, floor, self.value_dtype is not None)
            elif self.reuses and call.in_sync and not _is_due(call.t, self.threshold_interval):
                assert memory.threshold is not None
                fits = partial(regions.fits, words_by_rank=allowed_words(call))
                kept, sizes_by_rank = top_k_by_reuse(
                    memory.threshold, sums, call.kept, regions.order, fits, transport, floor)
            else:
                kept, sizes_by_rank = global_top_k(sums, call.kept, regions.order, transport, floor)
            link, kept = link.fitted_to(kept)
            return kept, sizes_by_rank[regions.order], link

    def _balances(self, sizes_by_region: Counts, call: Call, regions: Division) -> bool:
        """Return True if blocks are made equal before they are gathered: if they are uneven, within the bound."""
        return (needs_balance(sizes_by_region, self.balance_trigger)
                and regions.fits_balanced(sizes_by_region, allowed_words(call)))

    def global_k(self, k: int, n: int, size: int) -> int:
        return self._global_k(k, n, size)

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        """Return the number of selected elements of each region; zeros if regions are not known yet."""
        if memory.boundaries is None:
            return np.zeros(size, np.int64)
        return count_by_region(mine.elements.indices, memory.boundaries)


def allowed_words(call: Call) -> Words:
    """Return the words that each rank may send, by Equation 3.

    Of 2(k + 2k')(P-1)/P words, a rank that has selected k elements may send up to 2k in phase 1. The rest is for
    phase 2, the same for every rank. So a rank that has selected `lengths` elements (of a host's slice, for example)
    may send 2 lengths + rest.
    """
    words: Words = 2 * call.lengths + (oktopk_bound(call.k, len(call.lengths), call.kept) - 2 * call.k)
    return words


def _is_due(t: int, interval: int) -> bool:
    return (t - 1) % interval == 0
