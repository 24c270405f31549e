"""gTopk (Shi et al., ICDCS 2019): the top-k of the sum, merged up a tree, and sent down it again.

A merge adds two vectors and keeps the k largest elements. The paper's Algorithm 4 takes what a rank
selected as sent if its index is in the result; but a merge may have dropped it on the way, while
another branch brought the index in. Here the way down tells which indices of the result this befell,
in one bit each: their elements stay in the residual, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, WireError
from ..phases.link import Link
from ..selection.local_top_k import nonzero_top_k
from ..selection.selection import Selection
from ..transport.base import WORD, Bytes, Transport
from ..vectors.sparse import Indices, SparseVector, sum_of
from ..vectors.wire import WireCodec
from .algorithm import Algorithm, Call, Memory, Result
from .options import Scheme, Unit
from .topka import TopkAAllreduce


@dataclass(frozen=True, eq=False)
class GTopk(Scheme):
    """gTop-k (Shi et al., ICDCS 2019): the top-k of sums, merged along a tree.

    The root of the tree sends and receives 4k⌈log₂ P⌉ words. The options density, transport and
    hierarchical are explained in `OkTopk`.

    Args:
        collective: `"tree"` (the paper's Algorithm 4), or `"allgather"` (Algorithm 2, the naive one: the top-k of the
            sum), in 2k(P−1) words.

    Examples:
        >>> compression = GTopk(density=0.01, collective="allgather")
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    """

    collective: Literal["tree", "allgather"] = "tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collective not in ("tree", "allgather"):
            raise OptionError(f"collective must be 'tree' or 'allgather'; got {self.collective!r}")

    def algorithm(self, unit: Unit = "gradients") -> GTopkAllreduce | NaiveGTopkAllreduce:  # noqa: ARG002
        """Return the algorithm with these options."""
        return GTopkAllreduce() if self.collective == "tree" else NaiveGTopkAllreduce()


class NaiveGTopkAllreduce(TopkAAllreduce):
    """Algorithm 2: every rank gathers all ranks' top-k, and selects from the sum. A rank sends 2k(P-1) words."""

    keeps_k = True


class GTopkAllreduce(Algorithm):
    """Algorithm 3 over a binomial tree, for any P. A rank sends or receives at most 4k log2 P words, rounded up."""

    keeps_k = True

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:  # noqa: ARG002
        codec = PaddedCodec(link.codec, max(call.kept, int(call.lengths.max())), call.n)
        with link.transport.phase("reduce_tree"):
            merged, dropped = _merge(mine.sent, call.kept, codec, link.transport)
        with link.transport.phase("broadcast_tree"):
            update, lost = _broadcast(merged, dropped, codec, link.transport)
        reached = mine.sent.positions_in(update.compress(~lost))
        return Result(update, mine.sent.indices[reached], Memory(call.t), mine.elements)


def tree_distances(size: int) -> list[int]:
    """Return the distance between partners in each round: 1, 2, 4, ... below P."""
    return [1 << i for i in range((size - 1).bit_length())]


@dataclass(frozen=True)
class PaddedCodec:
    """A codec of vectors of up to k elements of n, in messages of one length, which a receiver knows beforehand."""

    codec: WireCodec
    k: int
    n: int

    @property
    def size(self) -> int:
        """Bytes of a message: of the longest, as all n elements take fewer than all but one."""
        return WORD + max(self.codec.size(count, self.n) for count in (self.k - 1, self.k))

    def encode(self, vector: SparseVector) -> Bytes:
        """Write the vector's length, the vector, and zeros."""
        length = np.array([len(vector)], np.uint32).view(np.uint8)
        return _padded(np.concatenate([length, self.codec.encode(vector, 0, self.n)]), self.size)

    def decode(self, message: Bytes) -> SparseVector:
        """Read the vector. Raise WireError if the message cannot hold it."""
        count = int(message[:WORD].copy().view(np.uint32)[0])
        size = self.codec.size(count, self.n) if count <= self.k else len(message)
        if WORD + size > len(message):
            raise WireError(f"a message of {len(message)} bytes cannot hold {count} elements")
        return self.codec.decode(message[WORD:WORD + size], count, 0, self.n)


def _padded(message: Bytes, size: int) -> Bytes:
    return np.concatenate([message, np.zeros(size - len(message), np.uint8)])


def _merge(selection: SparseVector, k: int, codec: PaddedCodec, transport: Transport,
           ) -> tuple[SparseVector, dict[int, Indices]]:
    """Merge selections up the tree, to k elements; also return the indices dropped here, by a partner's distance."""
    merged, dropped = selection, {}
    for distance in tree_distances(transport.size):
        children, parents = _partners(distance, transport)
        outgoing = {parent: codec.encode(merged) for parent in parents}
        for message in _swap(outgoing, dict.fromkeys(children, codec.size), transport):
            total = sum_of([merged, codec.decode(message)])
            merged = nonzero_top_k(total, k)
            dropped[distance] = np.setdiff1d(total.indices, merged.indices, assume_unique=True)
    return merged, dropped


def _broadcast(merged: SparseVector, dropped: Mapping[int, Indices], codec: PaddedCodec, transport: Transport,
               ) -> tuple[SparseVector, NDArray[np.bool_]]:
    """Send the root's vector down; also return a mask of its elements that merges up to the root dropped."""
    update, lost = merged, np.zeros(len(merged), np.bool_)
    mask_size = WORD * -(-codec.k // 32)  # a bit for each element
    for distance in reversed(tree_distances(transport.size)):
        if distance in dropped:
            lost |= np.isin(update.indices, dropped[distance], assume_unique=True)
        children, parents = _partners(distance, transport)
        outgoing = {child: np.concatenate([codec.encode(update), _padded(np.packbits(lost), mask_size)])
                    for child in children}
        for message in _swap(outgoing, dict.fromkeys(parents, codec.size + mask_size), transport):
            update = codec.decode(message[:codec.size])
            lost = np.unpackbits(message[codec.size:])[:len(update)].astype(np.bool_)
    return update, lost


def _partners(distance: int, transport: Transport) -> tuple[list[int], list[int]]:
    rank, place = transport.rank, transport.rank % (2 * distance)
    has_child = place == 0 and rank + distance < transport.size
    return [rank + distance] if has_child else [], [rank - distance] if place == distance else []


def _swap(outgoing: Mapping[int, Bytes], incoming: Mapping[int, int], transport: Transport) -> list[Bytes]:
    """Swap messages in one round. Collective, as a transport may use a collective for it."""
    return [message for batch in transport.send_and_receive(outgoing, incoming) for _, message in batch]
