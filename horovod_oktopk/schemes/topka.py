"""TopkA and Gaussiank: every rank gathers all ranks' top-k, or those above an estimated threshold, and sums."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from statistics import NormalDist

from ..phases.agreement import counts_for
from ..selection.accumulator import Accumulator
from ..selection.local_top_k import BUFFER_FACTOR, top_k
from ..vectors.sparse import SparseVector, sum_of
from ..vectors.wire import Extent
from .algorithm import Algorithm, Step
from .base import Scheme
from .report import StepResult

LOWERED = 0.9
"""Factor on a threshold that selects too few elements, applied until enough pass."""
ATTEMPTS = 64
"""Most thresholds to try. The last is about a thousandth of the first; then all elements are selected."""


class TopkAAllreduce(Algorithm):
    """u = Σ Topk(acc), of up to Pk elements. A rank sends 2k(P-1) words."""

    def exchange(self, step: Step) -> StepResult:
        sparse = step.sparse_transport()
        lengths = counts_for(step.counts, step.transport.rank).tolist()  # which the roll call has told
        with step.phase("allgatherv"):
            parts = sparse.allgatherv(step.selected, [(rank, Extent(count, 0, step.n))
                                                      for rank, count in enumerate(lengths)])
        with step.phase("sum"):
            update = self.kept(sum_of(parts), step.k)
        return step.result(update, step.selected.indices[step.selected.positions_in(update)])

    def kept(self, total: SparseVector, k: int) -> SparseVector:  # noqa: ARG002
        """Return the elements of the sum that are the update: all."""
        return total


@dataclass(frozen=True, eq=False)
class TopkA(Scheme):
    """TopkA (Renggli et al., 2019): every rank gathers all ranks' top-k: u = Σ Topk(residual + gradient).

    A rank sends 2k(P−1) words. The options density and transport are explained in `OkTopk`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=TopkA(density=0.01))
    """

    reduces = TopkAAllreduce


class GaussianKAllreduce(TopkAAllreduce):
    """TopkA with an estimated threshold (Ok-Topk, Section 5.4)."""

    def local_selection(self, acc: Accumulator, k: int) -> tuple[float, SparseVector]:
        first = gaussian_threshold(*acc.moments(), k / acc.n)
        for threshold in (*accumulate(repeat(LOWERED, ATTEMPTS - 1), mul, initial=first), 0.0):
            selection = acc.select(threshold, limit=acc.n)
            if selection is not None and len(selection) > 3 * k / 4:
                break
        assert selection is not None
        acc.expect(LOWERED * threshold, limit=min(BUFFER_FACTOR * k, acc.n // 4))
        return threshold, top_k(selection, k).copy()


def gaussian_threshold(mean: float, deviation: float, density: float) -> float:
    """Return the magnitude that this share of a normal distribution exceeds, by its upper tail's percent point."""
    share = max(min(1 - density / 2, 1 - 2.0**-53), 0.5)
    return max(0.0, abs(mean) + deviation * NormalDist().inv_cdf(share))


@dataclass(frozen=True, eq=False)
class GaussianK(Scheme):
    """Gaussiank (Shi et al., 2019): TopkA with a threshold that is estimated from mean and deviation.

    The threshold is lowered until more than 3k/4 elements pass; if more than k pass, the k largest are sent. The
    options density and transport are explained in `OkTopk`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=GaussianK(density=0.01))
    """

    reduces = GaussianKAllreduce
