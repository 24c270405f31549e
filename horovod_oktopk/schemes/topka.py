"""TopkA and Gaussiank: every rank gathers all ranks' top-k, or those above an estimated threshold, and sums.

TopkDSA, SparCML's dynamic sparse allreduce: split, reduce, gather; dense if smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from statistics import NormalDist
from typing import Any

import numpy as np

from ..phases.agreement import counts_for
from ..phases.exchange import SparseTransport, split_and_reduce
from ..phases.regions import Regions, count_by_region
from ..selection.accumulator import Accumulator
from ..selection.local_top_k import BUFFER_FACTOR, top_k
from ..transport.base import Bytes, Counts
from ..vectors.sparse import Indices, SparseVector, concatenate, sum_of
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
            total = sum_of(parts)
            update = self.kept(total, step.k)
        own = step.selected.indices
        return step.result(update, own if update is total else own[step.selected.positions_in(update)])

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
