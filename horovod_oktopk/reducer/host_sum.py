"""The sum of what the ranks of a host have, where each host is one worker: every rank gets that of its share.

It is made in rounds. In each, every rank lays out what it has of a part of all shares, and adds up what the others
have laid out of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..transport.base import Transport
from ..transport.counting import Hosts
from ..transport.shared_memory import shared_memory
from ..vectors.sparse import Values

SMALLEST, ROUNDS = 1 << 20, 64
"""How many elements a rank lays out for the others at a time: so many; of long vectors what makes so many rounds."""
BLOCK = 1 << 16
"""Elements that are added up at a time: they stay in the cache until they are used."""


class Mail(Protocol):
    """How values go from rank to rank of a host."""

    def outgoing(self, rank: int, length: int) -> Values:
        """Where what goes to another rank in this round is to be written."""

    def swap(self, length: int) -> list[Values]:
        """So many values of each rank, by rank: what it has written for this one; of this rank anything. Valid until
        the next round's."""


class SharedMail:
    """Through memory that all of the ranks see.

    Two boxes for each pair of ranks serve in turn: who has come to a round has read what was written in the last but
    one, so that nobody has to be waited for twice.
    """

    def __init__(self, memories: Sequence[NDArray[np.uint8]], within: Transport, dtype: Any) -> None:
        shape = 2, within.size, -1
        self._within = within
        self._boxes = [memory.view(dtype).reshape(shape) for memory in memories]
        self._turn = 0

    def outgoing(self, rank: int, length: int) -> Values:
        box: Values = self._boxes[self._within.rank][self._turn, rank, :length]
        return box

    def swap(self, length: int) -> list[Values]:
        self._within.allgather(np.zeros(1, np.int64))  # all have written
        came = [boxes[self._turn, self._within.rank, :length] for boxes in self._boxes]
        self._turn = 1 - self._turn
        return came


class MessageMail:
    """By messages, where ranks share no memory."""

    def __init__(self, within: Transport, capacity: int, dtype: Any) -> None:
        self._within = within
        self._boxes = np.empty((within.size, capacity), dtype)
        self._lengths = [0] * within.size

    def outgoing(self, rank: int, length: int) -> Values:
        self._lengths[rank] = length
        box: Values = self._boxes[rank, :length]
        return box

    def swap(self, length: int) -> list[Values]:
        within, others = self._within, [rank for rank in range(self._within.size) if rank != self._within.rank]
        nothing = self._boxes[within.rank, :length]
        outgoing = {rank: self._boxes[rank, :self._lengths[rank]].view(np.uint8) for rank in others
                    if self._lengths[rank]}
        incoming = {rank: nothing.nbytes for rank in others if length}
        came = {rank: message.view(nothing.dtype) for batch in within.exchange(outgoing, incoming, within.size)
                for rank, message in batch}
        return [came.get(rank, nothing) for rank in range(within.size)]


class HostSum:
    """Adds up vectors of `whole` elements on a host; one object on each of its ranks, made on all together."""

    def __init__(self, whole: int, dtype: Any, hosts: Hosts) -> None:
        self._within, self._dtype = hosts.within, np.dtype(dtype)
        self.bounds: list[int] = hosts.bounds(whole).tolist()
        """Of the shares: offsets from 0 to whole."""
        size = hosts.within.size
        longest = max(stop - start for start, stop in pairwise(self.bounds))
        self._length = max(1, min(longest, max(SMALLEST, whole // ROUNDS) // max(1, size - 1)))
        self._rounds = -(-longest // self._length)
        self._mail: Mail = MessageMail(hosts.within, self._length, dtype)
        if size > 1:
            memories = shared_memory(2 * size * self._length * self._dtype.itemsize, hosts.within)
            self._mail = self._mail if memories is None else SharedMail(memories, hosts.within, dtype)

    def of(self, pieces: Iterable[tuple[int, NDArray[Any]]], rest: Values | None = None, scale: float = 1.0,
           clear: bool = False) -> Iterator[tuple[int, Values]]:
        """This rank's share of the sum, in order: (offset in the share, values), valid until the next are asked for.

        Summands are added in the ranks' order. pieces: (offset, array) pairs that together cover this rank's vector,
        in ascending order. rest: what is to be added to them, scale times, shape (whole,). clear: leaves zeros in
        pieces of the sum's dtype.
        """
        mine, own = Pieces(pieces, self._dtype, clear), self._within.rank
        total, spare = np.empty((2, min(BLOCK, self._length)), self._dtype)
        for number in range(self._rounds):
            ranges = self._ranges(number)
            with self._within.phase("host_sum"):
                for rank, (start, stop) in enumerate(ranges):
                    if rank != own:
                        box = self._mail.outgoing(rank, stop - start)
                        mine.copy(start, stop, box)
                        if rest is not None:
                            box += rest[start:stop] * self._dtype.type(scale)
                start, stop = ranges[own]
                came = self._mail.swap(stop - start)
            for at in range(start, stop, BLOCK):
                end = min(at + BLOCK, stop)
                summands = [each[at - start:end - start] for each in came]
                summands[own] = mine.read(at, end, spare)
                _add_up(summands, total[:end - at])
                mine.clear(at, end)
                yield at - self.bounds[own], total[:end - at]

    def _ranges(self, number: int) -> list[tuple[int, int]]:
        """What a round is about: of each share, where it begins and ends."""
        first = number * self._length
        return [(min(start + first, stop), min(start + first + self._length, stop))
                for start, stop in pairwise(self.bounds)]


class Pieces:
    """A vector in pieces, in ascending order. clears: whether zeros are left in pieces of the dtype."""

    def __init__(self, pieces: Iterable[tuple[int, NDArray[Any]]], dtype: np.dtype[Any], clears: bool) -> None:
        self._pieces = [(offset, piece) for offset, piece in pieces if len(piece)]
        self._offsets = [offset for offset, _ in self._pieces]
        self._dtype = dtype
        self._clears = clears

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """What lies between, with its distance from start."""
        for offset, piece in self._pieces[bisect_right(self._offsets, start) - 1:]:
            if offset >= stop:
                return
            low = max(start, offset)
            yield low - start, piece[low - offset:stop - offset]

    def copy(self, start: int, stop: int, out: Values) -> None:
        """Elements from start to stop, which are needed no more."""
        for at, part in self._parts(start, stop):
            out[at:at + len(part)] = part
        self.clear(start, stop)

    def read(self, start: int, stop: int, spare: Values) -> Values:
        """Elements from start to stop: as they are, or copied into the spare."""
        parts = list(self._parts(start, stop))
        if len(parts) == 1 and parts[0][1].dtype == self._dtype:
            return parts[0][1]
        for at, part in parts:
            spare[at:at + len(part)] = part
        return spare[:stop - start]

    def clear(self, start: int, stop: int) -> None:
        """Leaves zeros from start to stop, where it is wanted."""
        for _, part in self._parts(start, stop) if self._clears else ():
            if part.dtype == self._dtype:
                part.fill(0)


def _add_up(summands: Sequence[Values], out: Values) -> None:
    first, *others = summands
    if not others:
        out[:] = first
    for index, other in enumerate(others):
        np.add(out if index else first, other, out=out)
