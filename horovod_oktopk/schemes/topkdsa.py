"""TopkDSA, SparCML's dynamic sparse allreduce: split, reduce, gather; dense if smaller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..phases.link import Link
from ..phases.regions import Regions, count_by_region
from ..phases.split import split_and_reduce
from ..selection.selection import Selection
from ..transport.base import Counts
from ..vectors.sparse import Indices, RunVector, SparseVector, concatenate
from .algorithm import Algorithm, Call, Memory, Result
from .options import Scheme


class TopkDSAAllreduce(Algorithm):
    """u = Σ Topk(acc), summed by regions of n/P elements. A rank sends 4k(P-1)/P to (2k + n)(P-1)/P words."""

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        """Return the number of selected elements of each region."""
        return count_by_region(mine.elements.indices, equal_regions(n, size))

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:  # noqa: ARG002
        transport, counts = link.transport, call.counts
        boundaries = equal_regions(call.n, transport.size)
        sent = count_by_region(mine.sent.indices, boundaries)
        received = counts[:, transport.rank if counts.shape[1] > 1 else 0]  # see `agreement.tell`
        regions = Regions(boundaries, sent, received)
        reduced = split_and_reduce(mine.sent, regions, link)
        with transport.phase("agree"):
            sizes_by_region = transport.allgather(np.array([len(reduced)], np.int64)).ravel()
        with transport.phase("allgatherv"):
            update = allgather_smaller(reduced, sizes_by_region, regions, link)
        return Result(update, mine.sent.indices, Memory(call.t), mine.elements)


@dataclass(frozen=True, eq=False)
class TopkDSA(Scheme):
    """SparCML (Renggli et al., SC 2019): u = Σ Topk(residual + gradient), summed by regions, sparse or dense.

    A rank sends 4k(P−1)/P to (2k + n)(P−1)/P words: more if the ranks' selections differ more. The options
    density, transport and hierarchical are explained in `OkTopk`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=TopkDSA(density=0.01))
    """

    reduces = TopkDSAAllreduce


def equal_regions(n: int, size: int) -> Indices:
    """Return the boundaries of P regions of equal length: int64, shape (P + 1,)."""
    return (np.arange(size + 1, dtype=np.int64) * n) // size


def allgather_smaller(reduced: SparseVector, sizes_by_region: Counts, regions: Regions, link: Link) -> SparseVector:
    """Gather all regions, each sparse or as all of its values, whichever takes fewer bytes. Collective."""
    codec, rank, extents = link.codec, link.transport.rank, regions.extents(sizes_by_region)
    sparse_bytes = np.array(codec.message_sizes(extents))
    dense_bytes = np.diff(regions.boundaries) * reduced.values.dtype.itemsize
    is_dense = dense_bytes < sparse_bytes
    _, start, stop = extents[rank]
    if is_dense[rank]:
        values = np.zeros(stop - start, codec.dtype)
        values[reduced.indices - start] = reduced.values
        message = values.view(np.uint8)
    else:
        message = codec.encode(reduced, start, stop)
    messages = link.transport.allgatherv(message, np.where(is_dense, dense_bytes, sparse_bytes))
    return concatenate([RunVector.between(extent.start, message.copy().view(codec.dtype)) if dense
                        else codec.decode(message, *extent)
                        for message, extent, dense in zip(messages, extents, is_dense, strict=True)], codec.dtype)
