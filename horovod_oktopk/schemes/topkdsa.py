"""TopkDSA, SparCML's dynamic sparse allreduce (Renggli et al., 2019): split, reduce, gather; dense if smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..phases.agreement import counts_for
from ..phases.exchange import SparseTransport, split_and_reduce
from ..phases.regions import Regions, count_by_region
from ..transport.base import Bytes, Counts
from ..vectors.sparse import Indices, SparseVector, concatenate
from .algorithm import Algorithm, Step
from .base import Scheme
from .report import StepResult


class TopkDSAAllreduce(Algorithm):
    """u = Σ Topk(acc), summed by regions of n/P elements. A rank sends 4k(P-1)/P to (2k + n)(P-1)/P words."""

    def counts(self, selected: SparseVector, n: int, size: int) -> Counts:
        """Return the number of selected elements of each region."""
        return count_by_region(selected.indices, equal_regions(n, size))

    def exchange(self, step: Step) -> StepResult:
        sparse = step.sparse_transport()
        boundaries = equal_regions(step.n, step.transport.size)
        sent = count_by_region(step.selected.indices, boundaries)
        regions = Regions(boundaries, sent, counts_for(step.counts, step.transport.rank))
        with step.phase("split_and_reduce"):
            reduced = split_and_reduce(step.selected, regions, sparse)
        with step.phase("agree"):
            sizes = step.transport.allgather(np.array([len(reduced)], np.int64)).ravel()
        with step.phase("allgatherv"):
            update = allgather_smaller(reduced, sizes, regions, sparse)
        return step.result(update, step.selected.indices)


@dataclass(frozen=True, eq=False)
class TopkDSA(Scheme):
    """SparCML (Renggli et al., SC 2019): u = Σ Topk(residual + gradient), summed by regions, sparse or dense.

    A rank sends 4k(P−1)/P to (2k + n)(P−1)/P words: more if the ranks' selections differ more. The options
    density and transport are explained in `OkTopk`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=TopkDSA(density=0.01))
    """

    reduces = TopkDSAAllreduce


def equal_regions(n: int, size: int) -> Indices:
    """Return the boundaries of P regions of equal length: int64, shape (P + 1,)."""
    return (np.arange(size + 1, dtype=np.int64) * n) // size


def allgather_smaller(reduced: SparseVector, sizes: Counts, regions: Regions, sparse: SparseTransport,
                      ) -> SparseVector:
    """Gather all regions, each sparse or as all of its values, whichever takes fewer bytes.

    sizes: elements by region.
    """
    codec, extents = sparse.codec, regions.extents(sizes)
    sparse_bytes = np.array([codec.size(extent.length, extent.span) for extent in extents])
    dense_bytes = np.diff(regions.boundaries) * reduced.values.dtype.itemsize
    is_dense = dense_bytes < sparse_bytes
    _, start, stop = extents[sparse.transport.rank]
    if is_dense[sparse.transport.rank]:
        values = np.zeros(stop - start, codec.dtype)
        values[reduced.indices - start] = reduced.values
        message = values.view(np.uint8)
    else:
        message = codec.encode(reduced, start, stop)
    messages = sparse.transport.allgatherv(message, np.where(is_dense, dense_bytes, sparse_bytes))
    return concatenate([_from_dense(message, codec.dtype, extent.start) if dense else codec.decode(message, *extent)
                        for message, extent, dense in zip(messages, extents, is_dense, strict=True)], codec.dtype)


def _from_dense(message: Bytes, dtype: Any, start: int) -> SparseVector:
    values = message.copy().view(dtype)
    indices = np.flatnonzero(values)
    return SparseVector(indices + start, values[indices])
