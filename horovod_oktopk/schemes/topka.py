"""TopkA (Renggli et al., 2019; Shi et al., 2019): every rank gathers everyone's top-k, and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..vectors.sparse import Indices, SparseVector, sum_of
from ..vectors.wire import WireCodec
from .base import TopkScheme

if TYPE_CHECKING:
    from ..transport.counting import CountingTransport


class TopkAAllreduce(TopkScheme):
    """u = Σ Topk(acc), of up to Pk elements. A rank sends 2k(P-1) words."""

    def exchange(self, selection: SparseVector, counts: NDArray[np.int64], _k: int, n: int,
                 transport: CountingTransport) -> tuple[SparseVector, Indices]:
        with transport.phase("allgatherv"):
            parts = gather(selection, counts[:, 0], n, WireCodec(selection.values.dtype), transport)
        with transport.phase("sum"):
            return sum_of(parts), selection.indices


def gather(selection: SparseVector, lengths: NDArray[np.int64], n: int, codec: WireCodec,
           transport: CountingTransport) -> list[SparseVector]:
    """Everyone's selection, by rank. lengths: of each, int64, shape (P,)."""
    messages = transport.allgatherv(codec.encode(selection, 0, n), codec.sizes(lengths, np.full(len(lengths), n)))
    return [codec.decode(message, int(count), 0, n) for message, count in zip(messages, lengths, strict=True)]
