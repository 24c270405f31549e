"""TopkA (Renggli et al., 2019; Shi et al., 2019): every rank gathers all ranks' top-k, and sums."""

from __future__ import annotations

from dataclasses import dataclass

from ..phases.agreement import counts_for
from ..phases.sparse_transport import SparseTransport
from ..vectors.sparse import SparseVector, sum_of
from ..vectors.wire import Extent
from .algorithm import Algorithm, Step
from .base import Scheme, Unit
from .report import StepResult


@dataclass(frozen=True, eq=False)
class TopkA(Scheme):
    """TopkA (Renggli et al., 2019): every rank gathers all ranks' top-k: u = Σ Topk(residual + gradient).

    A rank sends 2k(P−1) words. The options density and transport are explained in `OkTopk`.

    Raises:
        OptionError: A value is not allowed.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=TopkA(density=0.01))
    """

    def algorithm(self, unit: Unit = "gradients") -> TopkAAllreduce:  # noqa: ARG002
        """Return the algorithm with these options."""
        return TopkAAllreduce()


class TopkAAllreduce(Algorithm):
    """u = Σ Topk(acc), of up to Pk elements. A rank sends 2k(P-1) words."""

    def exchange(self, step: Step) -> StepResult:
        with step.phase("allgatherv"):
            parts = gather(step.selected, step, step.sparse_transport())
        with step.phase("sum"):
            update = sum_of(parts)
        return step.result(update, step.selected.indices)


def gather(selection: SparseVector, step: Step, sparse: SparseTransport) -> list[SparseVector]:
    """Gather all ranks' selections, by rank; the roll call has told their lengths. Collective."""
    lengths = counts_for(step.counts, sparse.rank).tolist()
    return sparse.allgatherv(selection, [(rank, Extent(count, 0, step.n)) for rank, count in enumerate(lengths)])
