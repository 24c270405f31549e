"""TopkA: every rank gathers all ranks' top-k, and sums."""

from __future__ import annotations

from dataclasses import dataclass

from ..phases.link import Link
from ..selection.local_top_k import nonzero_top_k
from ..selection.selection import Selection
from ..vectors.sparse import sum_of
from ..vectors.wire import Extent
from .algorithm import Algorithm, Call, Memory, Result
from .options import Scheme


class TopkAAllreduce(Algorithm):
    """u = Σ Topk(acc), of up to Pk elements. A rank sends 2k(P-1) words."""

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:  # noqa: ARG002
        with link.transport.phase("allgatherv"):
            extents = [(rank, Extent(length, 0, call.n)) for rank, length in enumerate(call.counts[:, 0].tolist())]
            parts = link.allgatherv(mine.sent, extents)
        with link.transport.phase("sum"):
            total = sum_of(parts)
            update = nonzero_top_k(total, call.kept) if self.keeps_k else total
        own = mine.sent.indices
        reached = own if update is total else own[mine.sent.positions_in(update)]
        return Result(update, reached, Memory(call.t), mine.elements)


@dataclass(frozen=True, eq=False)
class TopkA(Scheme):
    """TopkA (Renggli et al., 2019): every rank gathers all ranks' top-k: u = Σ Topk(residual + gradient).

    A rank sends 2k(P−1) words. The options density, transport and hierarchical are explained in `OkTopk`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=TopkA(density=0.01))
    """

    reduces = TopkAAllreduce
