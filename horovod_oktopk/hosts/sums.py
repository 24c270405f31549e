"""The sum of the vectors of a host's ranks, if each host is one worker: every rank gets the sum of its slice.

A rank keeps 1/L of the residual that it would keep as a worker of its own, and selects from that slice.

The sum is made in rounds. In each, every rank lays out its elements of a part of all slices, and adds up the elements
that the others have laid out for its own slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels import KERNELS, CandidateBuffer
from ..selection.accumulator import NumpyAccumulator, Pieces, Sum, between, converted
from ..vectors.sparse import Indices, SparseVector, Values
from .hosts import Hosts
from .memory import shared_memory

SMALLEST = 1 << 20
"""Elements that a rank lays out for the others at a time, at least; more of long vectors, see HostSum."""


class HostSum:
    """The sums of vectors of `whole` elements on a host; one object on each of its ranks, made on all together.

    Long vectors take several rounds, so that the laid out elements of a rank take a quarter of the memory of its
    residual and acc. Fewer rounds would be faster, as the ranks wait for one another in each.

    A rank lays elements out in boxes, one for each other rank. If ranks share no memory, boxes go by message. If they
    do, two boxes for each pair of ranks serve in turn: a rank that has come to a round has read the box of the last
    round but one, so that no rank has to be waited for twice.
    """

    def __init__(self, whole: int, dtype: Any, hosts: Hosts) -> None:
        self._within, self._dtype = hosts.within, np.dtype(dtype)
        self.bounds: list[int] = hosts.bounds(whole).tolist()
        """Bounds of the slices: offsets from 0 to whole."""
        size = hosts.within.size
        self._longest = max(stop - start for start, stop in pairwise(self.bounds))
        self._length = max(1, min(self._longest, max(SMALLEST, -(-whole // (4 * size))) // max(1, size - 1)))
        self._none_passes = CandidateBuffer(0, dtype)
        length = 2 * (size - 1) * self._length * self._dtype.itemsize
        memories = shared_memory(length, hosts.within) if size > 1 else None
        self._share_memory = memories is not None
        if memories is None:
            memories = [np.empty(length // 2 if rank == hosts.within.rank else 0, np.uint8) for rank in range(size)]
        self._boxes = [memory.view(dtype).reshape(-1, max(1, size - 1), self._length) for memory in memories]
        self._turn = 0

    def of(self, pieces: Iterable[tuple[int, NDArray[Any]]], rest: Values | None, clear: bool) -> Iterator[Sum]:
        """Yield this rank's slice of the sum, in order, as summands to add up. Collective.

        An item is valid until the next is asked for. Summands are in the ranks' order.
        The pieces, (offset, array) pairs in ascending order, together cover this rank's vector. `rest`, of shape
        (whole,), is added to them. `clear` leaves zeros in the parts that are sent of pieces of the sum's dtype.
        """
        parts = list(pieces)
        own = self._within.rank
        for first in range(0, self._longest, self._length):
            ranges = [(min(start + first, stop), min(start + first + self._length, stop))
                      for start, stop in pairwise(self.bounds)]  # to be summed of each slice
            with self._within.phase("host_sum"):
                for rank, (start, stop) in enumerate(ranges):
                    if rank != own:
                        added = None if rest is None else rest[start:stop]
                        self._write(parts, start, stop, added, self._box(own, rank, stop - start), clear)
                came = self._swap([stop - start for start, stop in ranges])
            start, stop = ranges[own]
            for at, piece in between(parts, start, stop):
                part = slice(at, at + len(piece))
                yield (start + at - self.bounds[own], piece, [came[rank][part] for rank in range(own)],
                       [came[rank][part] for rank in range(own + 1, self._within.size)])

    def _write(self, pieces: Pieces, start: int, stop: int, summand: Values | None, out: Values,
               clear: bool) -> None:
        """Copy elements (plus the summand, if any) into a box, and zero them.

        The kernel that adds streams past the cache, which costs much less than a copy and zeros, so it makes plain
        copies, too: factor 0.0 switches its first argument off. It makes NaN of infinity: neither is finite.
        """
        for at, part in between(pieces, start, stop):
            for offset, gradient in converted(part, self._dtype, clear):
                into = slice(at + offset, at + offset + len(gradient))
                added, factor = (gradient, 0.0) if summand is None else (summand[into], 1.0)
                KERNELS.add_and_collect(added, gradient, out[into], factor, np.inf, 0, self._none_passes, True, clear)

    def _box(self, source: int, to: int, length: int) -> Values:
        """Return the box from one rank to another; a rank has none for itself."""
        box: Values = self._boxes[source][self._turn, to - (to > source), :length]
        return box

    def _swap(self, lengths: Sequence[int]) -> dict[int, Values]:
        """Return the elements that the others have laid out for this rank, by rank; valid until the next round's.

        The lengths are the numbers of elements that were laid out for each rank. Nothing comes if that is 0 here.
        """
        within, own = self._within, self._within.rank
        others = [rank for rank in range(within.size) if rank != own]
        if self._share_memory:
            # All have written. Stores past the cache are done too, as a kernel that returns takes the interpreter's
            # lock.
            within.allgather(np.zeros(1, np.int64))
            came = {rank: self._box(rank, own, lengths[own]) for rank in others}
            self._turn = 1 - self._turn
            return came
        outgoing = {rank: self._box(own, rank, lengths[rank]).view(np.uint8) for rank in others if lengths[rank]}
        incoming = {rank: lengths[own] * self._dtype.itemsize for rank in others if lengths[own]}
        return {rank: message.view(self._dtype)
                for batch in within.send_and_receive(outgoing, incoming) for rank, message in batch}


class HostAccumulator(NumpyAccumulator):
    """A ResidualAccumulator of a slice of the `whole` vector, which takes gradients of the whole.

    `hosts` is called at every step, as elastic training changes the hosts; it returns None if each rank is a host of
    its own, and keeps all elements. The slice is known from the first step on; until then n is 0. `read_residual`
    returns the whole, with zeros outside of the slice. `load_residual` takes any vector: values outside of the slice
    are added to this rank's next gradient, and so come to the rank of their slice.
    """

    def __init__(self, whole: int, dtype: Any, hosts: Callable[[], Hosts | None]) -> None:
        self.whole = whole
        self._hosts = hosts
        self._known: object = False  # the hosts of the slice, or None; False before the first step
        self._sum: HostSum | None = None
        self._slice = slice(0, 0)
        self._outside: Values | None = None  # until it is committed
        super().__init__(0, dtype)

    def accumulate(self, pieces: Iterable[tuple[int, NDArray[Any]]], clear: bool = False) -> bool:
        hosts = self._hosts()
        if hosts is not self._known:
            self._move_to(hosts)
        if self._sum is None:
            return super().accumulate(pieces, clear)
        return self._add_sums(self._sum.of(pieces, self._outside, clear), clear)

    def _move_to(self, hosts: Hosts | None) -> None:
        """Hold this rank's slice on these hosts. The residual stays, and comes to the ranks of its slices."""
        residual, self._known = self.read_residual(), hosts
        if hosts is None:
            self._sum, self._slice = None, slice(0, self.whole)
        else:
            self._sum = HostSum(self.whole, self.dtype, hosts)
            self._slice = hosts.slice_of(self.whole)
        super().__init__(self._slice.stop - self._slice.start, self.dtype)
        self.load_residual(residual)

    def commit(self, contributed: Indices | slice, remainder: SparseVector | None = None) -> None:
        super().commit(contributed, remainder)
        self._outside = None

    def read_residual(self) -> Values:
        residual = np.zeros(self.whole, self.dtype) if self._outside is None else self._outside.copy()
        residual[self._slice] = self.residual
        return residual

    def load_residual(self, values: Values) -> None:
        outside: Values = np.array(values, self.dtype)
        super().load_residual(outside[self._slice])
        outside[self._slice] = 0
        self._outside = outside if outside.any() else None
