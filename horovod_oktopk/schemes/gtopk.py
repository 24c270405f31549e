"""gTopk (Shi et al., ICDCS 2019): the top-k of the sum, merged up a tree, and sent down it again.

A merge adds two vectors and keeps the k largest elements. The paper's Algorithm 4 takes what a rank
selected as sent if its index is in the result; but a merge may have dropped it on the way, while
another branch brought the index in. Here the way down tells which indices of the result this befell,
in one bit each: their elements stay in the residual, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import WireError
from ..selection.local_top_k import top_k
from ..vectors.sparse import Indices, SparseVector, sum_of
from ..vectors.wire import WORD, Bytes, WireCodec
from .base import TopkScheme
from .topka import gather

if TYPE_CHECKING:
    from ..transport.counting import CountingTransport

Mask = NDArray[np.bool_]


class NaiveGTopkAllreduce(TopkScheme):
    """Algorithm 2: everyone gathers everyone's top-k, and selects of the sum. A rank sends 2k(P-1) words."""

    def exchange(self, selection: SparseVector, counts: NDArray[np.int64], k: int, n: int,
                 transport: CountingTransport) -> tuple[SparseVector, Indices]:
        with transport.phase("allgatherv"):
            parts = gather(selection, counts[:, 0], n, WireCodec(selection.values.dtype), transport)
        with transport.phase("sum"):
            update = nonzero_top_k(sum_of(parts), k)
        return update, selection.indices[selection.positions_in(update)]


class GTopkAllreduce(TopkScheme):
    """Algorithm 3 over a binomial tree, for any P. A rank sends or receives at most 4k log2 P words, rounded up."""

    def exchange(self, selection: SparseVector, _counts: NDArray[np.int64], k: int, n: int,
                 transport: CountingTransport) -> tuple[SparseVector, Indices]:
        merged = selection
        dropped: dict[int, Indices] = {}  # by the distance of the partner
        with transport.phase("reduce_tree"):
            for distance in tree_distances(transport.size):
                received = _up(merged, distance, k, n, transport)
                if received is not None:
                    total = sum_of([merged, received])
                    merged = nonzero_top_k(total, k)
                    dropped[distance] = np.setdiff1d(total.indices, merged.indices, assume_unique=True)
        update, lost = merged, np.zeros(len(merged), np.bool_)
        with transport.phase("broadcast_tree"):
            for distance in reversed(tree_distances(transport.size)):
                if distance in dropped:
                    lost |= np.isin(update.indices, dropped[distance], assume_unique=True)
                update, lost = _down(update, lost, distance, k, n, transport)
        sent = update.compress(~lost)
        return update, selection.indices[selection.positions_in(sent)]


def nonzero_top_k(total: SparseVector, k: int) -> SparseVector:
    """The k largest elements; sums that cancel to zero are none."""
    return top_k(total.compress(total.values != 0), k)


def tree_distances(size: int) -> list[int]:
    """How far partners are apart in each round: 1, 2, 4, ... below P."""
    return [1 << i for i in range((size - 1).bit_length())]


def _partners(distance: int, transport: CountingTransport) -> tuple[int | None, int | None]:
    """(the child that sends to this rank, the parent that it sends to) on the way up at a distance."""
    rank = transport.rank
    if rank % (2 * distance) == distance:
        return None, rank - distance
    if rank % (2 * distance) == 0 and rank + distance < transport.size:
        return rank + distance, None
    return None, None


def _up(merged: SparseVector, distance: int, k: int, n: int, transport: CountingTransport) -> SparseVector | None:
    child, parent = _partners(distance, transport)
    codec = WireCodec(merged.values.dtype)
    outgoing = {} if parent is None else {parent: _pad(merged, k, n, codec)}
    messages = _swap(outgoing, {} if child is None else {child: _padded_bytes(k, n, codec)}, transport)
    return _unpad(messages[0], n, codec) if messages else None


def _down(update: SparseVector, lost: Mask, distance: int, k: int, n: int, transport: CountingTransport,
          ) -> tuple[SparseVector, Mask]:
    child, parent = _partners(distance, transport)
    codec = WireCodec(update.values.dtype)
    vector_bytes, mask_bytes = _padded_bytes(k, n, codec), WORD * -(-k // 32)
    outgoing = {}
    if child is not None:
        bits = np.zeros(mask_bytes, np.uint8)
        packed = np.packbits(lost)
        bits[:len(packed)] = packed
        outgoing[child] = np.concatenate([_pad(update, k, n, codec), bits])
    messages = _swap(outgoing, {} if parent is None else {parent: vector_bytes + mask_bytes}, transport)
    if messages:
        update = _unpad(messages[0][:vector_bytes], n, codec)
        lost = np.unpackbits(messages[0][vector_bytes:])[:len(update)].astype(np.bool_)
    return update, lost


def _swap(outgoing: Mapping[int, Bytes], incoming: Mapping[int, int], transport: CountingTransport,
          ) -> list[Bytes]:
    """One round; all ranks take part, as a transport may do it by a collective."""
    return [message for batch in transport.exchange(outgoing, incoming, 1) for _, message in batch]


def _padded_bytes(k: int, n: int, codec: WireCodec) -> int:
    return WORD + codec.size(k, n)


def _pad(vector: SparseVector, k: int, n: int, codec: WireCodec) -> Bytes:
    """Its length, and room for k elements: so its receiver knows the message's length beforehand."""
    message = np.zeros(_padded_bytes(k, n, codec), np.uint8)
    message[:WORD].view(np.uint32)[0] = len(vector)
    encoded = codec.encode(vector, 0, n)
    message[WORD:WORD + len(encoded)] = encoded
    return message


def _unpad(message: Bytes, n: int, codec: WireCodec) -> SparseVector:
    count = int(message[:WORD].copy().view(np.uint32)[0])
    size = codec.size(count, n) if count <= n else len(message)
    if WORD + size > len(message):
        raise WireError(f"a message of {len(message)} bytes cannot hold {count} elements")
    return codec.decode(message[WORD:WORD + size], count, 0, n)
