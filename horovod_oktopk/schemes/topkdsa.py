"""TopkDSA, SparCML's dynamic sparse allreduce (Renggli et al., 2019): split, reduce, gather; dense where smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..phases.split_reduce import split_and_reduce
from ..vectors.sparse import Indices, SparseVector, concatenate
from ..vectors.wire import Bytes, WireCodec
from .base import TopkScheme

if TYPE_CHECKING:
    from ..transport.counting import CountingTransport


class TopkDSAAllreduce(TopkScheme):
    """u = Σ Topk(acc), summed by regions of n/P elements. A rank sends 4k(P-1)/P to (2k + n)(P-1)/P words.

    messages_in_flight: how many messages fly at once while what came before them is decoded.
    """

    def __init__(self, description: str, messages_in_flight: int = 8) -> None:
        super().__init__(description)
        self.messages_in_flight = messages_in_flight

    def counts(self, selection: SparseVector, n: int, size: int) -> NDArray[np.int64]:
        """Elements by region."""
        return np.diff(np.searchsorted(selection.indices, equal_regions(n, size)))

    def exchange(self, selection: SparseVector, counts: NDArray[np.int64], _k: int, n: int,
                 transport: CountingTransport) -> tuple[SparseVector, Indices]:
        boundaries = equal_regions(n, transport.size)
        with transport.phase("split_and_reduce"):
            reduced = split_and_reduce(selection, boundaries, counts, 0, self.messages_in_flight,
                                       WireCodec(selection.values.dtype), transport)
        with transport.phase("agree"):
            sizes = transport.allgather(np.array([len(reduced)], np.int64))[:, 0]
        with transport.phase("allgatherv"):
            return allgather_smaller(reduced, sizes, boundaries, transport), selection.indices


def equal_regions(n: int, size: int) -> Indices:
    """Boundaries of P regions of equal length: int64, shape (P + 1,)."""
    return (np.arange(size + 1, dtype=np.int64) * n) // size


def allgather_smaller(reduced: SparseVector, sizes: NDArray[np.int64], boundaries: Indices,
                      transport: CountingTransport) -> SparseVector:
    """All regions, each as it takes fewer bytes: sparse, or as all of its values. sizes: elements by region."""
    codec, lengths = WireCodec(reduced.values.dtype), np.diff(boundaries)
    sparse_bytes, dense_bytes = codec.sizes(sizes, lengths), lengths * reduced.values.dtype.itemsize
    is_dense = dense_bytes < sparse_bytes
    ends = boundaries.tolist()
    start, stop = ends[transport.rank], ends[transport.rank + 1]
    message = (_dense(reduced, start, stop - start).view(np.uint8) if is_dense[transport.rank]
               else codec.encode(reduced, start, stop))
    messages = transport.allgatherv(message, np.where(is_dense, dense_bytes, sparse_bytes))
    parts = [_from_dense(message, codec.dtype, ends[region]) if is_dense[region]
             else codec.decode(message, int(sizes[region]), ends[region], ends[region + 1])
             for region, message in enumerate(messages)]
    return concatenate(parts, codec.dtype)


def _dense(part: SparseVector, start: int, length: int) -> NDArray[Any]:
    values = np.zeros(length, part.values.dtype)
    values[part.indices - start] = part.values
    return values


def _from_dense(message: Bytes, dtype: Any, start: int) -> SparseVector:
    values = message.copy().view(dtype)
    indices = np.flatnonzero(values)
    return SparseVector(indices + start, values[indices])
