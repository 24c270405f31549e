"""A transport that counts the rounds and messages of each rank, by phase; its bytes are counted as everywhere.

A collective is taken in two ways. As a tree: an allgather by dissemination, as MPITransport's own is, in ⌈log2 P⌉
rounds; an alltoall as MPITransport's own is; an allreduce in twice as many as an allgather. And as a ring: P - 1
rounds, and twice as many for an allreduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from horovod_oktopk.transport.base import Bytes, Counts, Values, alltoall_rounds, batch_length
from horovod_oktopk.transport.counting import CountingTransport, Log


@dataclass
class Way:
    """Work of one rank in one way. rounds: one after the other. messages: sent or received, whichever are more."""

    rounds: int = 0
    messages: int = 0

    def add(self, rounds: int, messages: int) -> None:
        self.rounds += rounds
        self.messages += messages


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
        """The one of the present phase."""
        return self.crossings.setdefault(self.phase, Crossing())


@dataclass
class LinkTransport(CountingTransport):
    """A CountingTransport that notes crossings."""

    log: LinkLog

    def reset(self) -> None:
        super().reset()
        self.log.crossings = {}

    def allgather(self, row: Counts) -> Counts:
        self._gathers(1)
        return super().allgather(row)

    def alltoall(self, rows: Counts) -> Counts:
        rounds = alltoall_rounds(self.size)
        self._both(len(rounds), sum(len(each) for each in rounds))
        return super().alltoall(rows)

    def allreduce(self, values: Values) -> Values:
        self._gathers(2)
        return super().allreduce(values)

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        self._gathers(1)
        return super().allgatherv(message, sizes)

    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        messages = max(len(outgoing), len(incoming))
        self._both(-(-messages // batch_length(self.size)), messages)
        return super().send_and_receive(outgoing, incoming)

    def _gathers(self, times: int) -> None:
        """Note the messages of `times` allgathers, a round each."""
        levels, others = times * (self.size - 1).bit_length(), times * (self.size - 1)
        self.log.crossing.tree.add(levels, levels)
        self.log.crossing.ring.add(others, others)

    def _both(self, rounds: int, messages: int) -> None:
        """Note rounds and messages that are the same as a tree and as a ring."""
        self.log.crossing.tree.add(rounds, messages)
        self.log.crossing.ring.add(rounds, messages)
