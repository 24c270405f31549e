"""What crosses the links of hosts with one or several ranks: rounds and messages of each rank, and its bytes.

A collective is taken in two ways. As a tree: an allgather by dissemination, as MPITransport's own is, in ⌈log2 P⌉
rounds; an alltoall as MPITransport's own is; an allreduce in twice as many, with as many bytes for
each rank. And as a ring in the order of the ranks: P - 1 rounds, and of a host only the last rank's bytes leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from horovod_oktopk.transport.base import Bytes, Counts, Values, alltoall_rounds, batch_length
from horovod_oktopk.transport.counting import CountingTransport, Log


@dataclass
class Way:
    """What one rank does in one way. rounds: one after the other. messages: sent or received, whichever are more.
    away: those sent to other hosts. left, came: over its host's link, bytes, or of a call their share in all."""

    rounds: float = 0
    messages: float = 0
    away: float = 0
    left: float = 0
    came: float = 0

    def add(self, call: Way, sent: float = 1, received: float = 1) -> None:
        """sent, received: all bytes of the call."""
        self.rounds += call.rounds
        self.messages += call.messages
        self.away += call.away
        self.left += call.left * sent
        self.came += call.came * received


@dataclass
class Crossing:
    """One phase of one rank, in both ways."""

    tree: Way = field(default_factory=Way)
    ring: Way = field(default_factory=Way)


@dataclass
class LinkLog(Log):
    """A Log that has the crossings too, by phase."""

    crossings: dict[str, Crossing] = field(default_factory=dict)

    @property
    def crossing(self) -> Crossing:
        """Of the present phase."""
        return self.crossings.setdefault(self.phase, Crossing())


@dataclass
class LinkTransport(CountingTransport):
    """A CountingTransport that notes crossings. places: the host of each rank, shape (P,)."""

    log: LinkLog
    places: Counts = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        super().__post_init__()
        rank, size, others = self.rank, self.size, self.size - 1
        self._is_away = self.places != self.places[rank]
        away = int(self._is_away.sum())
        distances = [1 << level for level in range(others.bit_length())]
        levels, blocks = len(distances), [min(distance, size - distance) for distance in distances]
        to = [self._is_away[rank - distance] for distance in distances]
        of = [self._is_away[(rank + distance) % size] for distance in distances]
        after, before = self._is_away[(rank + 1) % size], self._is_away[rank - 1]
        left, came = np.dot(to, blocks) / others, np.dot(of, blocks) / others
        self._gathers = Crossing(Way(levels, levels, sum(to), left, came),
                                 Way(others, others, others * after, after, before))
        share = away / others
        self._tells = self._alltoall()
        self._sums = Crossing(Way(2 * levels, 2 * levels, 2 * sum(to), share, share),
                              Way(2 * others, 2 * others, 2 * others * after, after, before))

    def _alltoall(self) -> Crossing:
        rounds = alltoall_rounds(self.size)
        messages = [(distance, len(moved)) for each in rounds for distance, moved in each]
        distances, blocks = np.array(messages).reshape(-1, 2).T
        to = self._is_away[(self.rank + distances) % self.size]
        of = self._is_away[(self.rank - distances) % self.size]
        way = Way(len(rounds), len(messages), int(to.sum()), blocks @ to / blocks.sum(), blocks @ of / blocks.sum())
        return Crossing(way, way)

    def reset(self) -> None:
        super().reset()
        self.log.crossings = {}

    def allgather(self, row: Counts) -> Counts:
        return self._noted(self._gathers, super().allgather, row)

    def alltoall(self, rows: Counts) -> Counts:
        return self._noted(self._tells, super().alltoall, rows)

    def allreduce(self, values: Values) -> Values:
        return self._noted(self._sums, super().allreduce, values)

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        return self._noted(self._gathers, super().allgatherv, message, sizes)

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 ) -> Iterator[list[tuple[int, Bytes]]]:
        messages = max(len(outgoing), len(incoming))
        call = Way(-(-messages // batch_length(self.size)), messages,
                   sum(bool(self._is_away[to]) for to in outgoing),
                   sum(len(message) for to, message in outgoing.items() if self._is_away[to]),
                   sum(length for source, length in incoming.items() if self._is_away[source]))
        self.log.crossing.tree.add(call)
        self.log.crossing.ring.add(call)
        return super().exchange(outgoing, incoming)

    def _noted(self, call: Crossing, action: Callable[..., Any], *arguments: Any) -> Any:
        before = replace(self.traffic)
        result = action(*arguments)
        sent, received = (self.traffic.bytes_sent - before.bytes_sent,
                          self.traffic.bytes_received - before.bytes_received)
        self.log.crossing.tree.add(call.tree, sent, received)
        self.log.crossing.ring.add(call.ring, sent, received)
        return result
