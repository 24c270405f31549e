"""The ranks' state machines together, without threads: a scheduler says what happens next, of all that can.

Signals arrive in any order, programs and rounds take any time, and each rank learns of a round's end at its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from horovod_oktopk.modes.partial.states import Activity, BeginRound, RankState, Service, Transition

Program = Sequence[str]
"""Calls of a rank: "step", "synchronize" and, as the last, "exit"."""
Events = Iterator[tuple[int, Callable[[], None]]]


@dataclass
class SeenRound:
    """State of all ranks in a round, by rank."""

    begun: dict[int, BeginRound] = field(default_factory=dict)
    gradients: dict[int, list[int]] = field(default_factory=dict)
    """The numbers of the steps whose gradients the rank contributed."""


@dataclass
class Rank:
    state: RankState
    program: list[str]
    steps: int = 0
    is_inside: bool = False
    """True if the program's next call has been made, and has not returned."""
    pending: list[int] = field(default_factory=list)
    synchronized: list[int] = field(default_factory=list)
    """The rounds that it had taken at the end of each synchronization."""


class World:
    """programs: of each rank. may_lose_patience: whether `overdue` may happen."""

    def __init__(self, programs: Sequence[Program], may_lose_patience: bool = False, policy: Any = "solo",
                 max_staleness: int = 16, seed: int = 0) -> None:
        size = len(programs)
        self.ranks = [Rank(RankState(rank, size, policy, seed, max_staleness), list(program))
                      for rank, program in enumerate(programs)]
        self.rounds: list[SeenRound] = []
        self.before: dict[int, RankState] = {}
        """Rank 0's state when it began each round, by number."""
        self.signals: list[tuple[int, int]] = []
        self.may_lose_patience = may_lose_patience

    def run(self, random: Random, speeds: Sequence[float]) -> None:
        """Run until all programs have ended. speeds: relative frequencies with which ranks are chosen."""
        for _ in range(100_000):
            possible = list(self.events())
            if all(not rank.program for rank in self.ranks):
                return
            assert possible, f"nothing can happen any more: {[rank.state for rank in self.ranks]}"
            [(_, event)] = random.choices(possible, [speeds[rank] for rank, _ in possible])
            event()
        raise AssertionError("the programs do not end")

    def events(self) -> Events:
        """Return all events that can happen now, by rank."""
        for index, rank in enumerate(self.ranks):
            state = rank.state
            if rank.program:
                yield from ((index, event) for event in self.events_of_program(index))
            if state.service == Service.IDLE:
                for signal in sorted({signal for signal in self.signals if signal[0] == index}):
                    yield index, lambda index=index, signal=signal: self._deliver(index, signal)
            elif state.is_round_running and len(self.rounds[state.rounds_begun - 1].begun) == len(self.ranks):
                yield index, lambda index=index: self._end_round(index)

    def events_of_program(self, index: int) -> Iterator[Callable[[], None]]:
        rank = self.ranks[index]
        state = rank.state
        if not rank.is_inside:
            if rank.program[0] != "step":
                yield lambda: self._enter(index, state.synchronizes(exits=rank.program[0] == "exit"))
            elif state.may_arrive:
                yield lambda: self._arrive(index)
        elif state.may_take:
            yield lambda: self._take(index)
        elif self.may_lose_patience and state.activity == Activity.WAITING and not self.signals and (
                state.rounds_begun == state.taken):
            yield lambda: self.do(index, state.overdue())

    def do(self, index: int, step: Transition) -> None:
        """Make a step of a rank."""
        rank, (after, actions) = self.ranks[index], step
        before, rank.state = rank.state, after
        for action in actions:
            if isinstance(action, BeginRound):
                self._begin_round(index, action, before)
            else:
                self.signals += [(to, action.number) for to in action.ranks]

    def _enter(self, index: int, step: Transition) -> None:
        self.do(index, step)
        self.ranks[index].is_inside = True

    def _arrive(self, index: int) -> None:
        rank = self.ranks[index]
        rank.pending.append(rank.steps)
        rank.steps += 1
        self._enter(index, rank.state.arrived())
        if rank.state.activity == Activity.COMPUTING:
            self._leave(rank)

    def _take(self, index: int) -> None:
        rank = self.ranks[index]
        self.do(index, rank.state.took())
        if rank.state.activity == Activity.COMPUTING:
            if rank.program[0] != "step":
                rank.synchronized.append(rank.state.taken)
            self._leave(rank)

    def _leave(self, rank: Rank) -> None:
        rank.is_inside = False
        rank.program.pop(0)

    def _deliver(self, index: int, signal: tuple[int, int]) -> None:
        self.signals.remove(signal)
        self.do(index, self.ranks[index].state.activated(signal[1]))

    def _begin_round(self, index: int, begun: BeginRound, before: RankState) -> None:
        if len(self.rounds) < begun.number:
            self.rounds.append(SeenRound())
        assert begun.number == len(self.rounds) == before.rounds_ended + 1, "all ranks are in the same round"
        rank = self.ranks[index]
        self.rounds[-1].begun[index] = begun
        contributes = rank.state.service == Service.CONTRIBUTING
        self.rounds[-1].gradients[index], rank.pending = (rank.pending, []) if contributes else ([], rank.pending)
        if index == 0:
            self.before[begun.number] = before

    def _end_round(self, index: int) -> None:
        state = self.ranks[index].state
        begun = self.rounds[state.rounds_begun - 1].begun
        self.do(index, state.ended([begun[rank].activity for rank in range(len(self.ranks))]))
