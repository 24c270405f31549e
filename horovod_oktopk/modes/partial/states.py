"""Partial rounds as one rank sees them: a state machine, drawn in docs/architecture.md.

The machine is pure: no thread, lock, clock or transport. An event is a method, which returns the next state and the
actions to be carried out, in order. `rounds.py` drives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Literal

import numpy as np

Policy = Literal["solo", "majority"]


class Activity(IntEnum):
    """The activity of a rank's program."""

    COMPUTING = 0
    """The program is at work outside; it may have handed in a gradient."""
    WAITING = 1
    """The program has handed in a gradient, and waits until a round has ended."""
    SYNCHRONIZING = 2
    """The program waits until all ranks synchronize or exit, and goes on training then."""
    EXITING = 3
    """The program waits like that, but will hand in no more gradients."""
    SYNCHRONIZED = 4
    """All ranks were synchronizing or exiting; this one has not taken the last rounds yet."""

    @property
    def goes_on(self) -> bool:
        """True if more gradients may come before the ranks are synchronized."""
        return self not in (Activity.SYNCHRONIZING, Activity.EXITING)


class Presence(IntEnum):
    """The part of a rank in a round."""

    ABSENT = 0
    """The rank has handed in nothing since the last round, and contributes nothing."""
    STALE = 1
    """The rank contributes a gradient that came too late for an earlier round."""
    FRESH = 2
    """The rank contributes a gradient, and waits for this round."""
    GIVEN_UP = 3
    """The rank has not taken the rounds before in time: all ranks fail."""


class Service(Enum):
    """The service of this rank for rounds meanwhile."""

    IDLE = "idle"
    """No round is under way here."""
    HELD = "held"
    """A round has been activated, and waits until this rank has taken some of the rounds before."""
    HELPING = "helping"
    """A round runs, without a gradient of this rank."""
    CONTRIBUTING = "contributing"
    """A round runs with this rank's gradient."""


@dataclass(frozen=True)
class Signal:
    """Action: activate the round of this number on those ranks, of which this may be one."""

    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class BeginRound:
    """Action: begin the next round here, and tell the other ranks these fields."""

    number: int
    presence: Presence
    activity: Activity
    staleness: int
    """Number of rounds before this one that this rank has not taken yet."""


Transition = tuple["RankState", tuple[Signal | BeginRound, ...]]


@dataclass(frozen=True)
class RankState:
    """One rank's state: activity, contribution and service, which change side by side, and its progress.

    The first five fields are constants; see PartialAllreduce.
    """

    rank: int
    size: int
    policy: Policy
    seed: int
    max_staleness: int
    activity: Activity = Activity.COMPUTING
    handed_in: Presence = Presence.ABSENT
    """This rank's presence in the next round, if that began now."""
    service: Service = Service.IDLE
    rounds_ended: int = 0
    """Number of rounds that have ended here."""
    taken: int = 0
    """Number of rounds that have ended, and that the program has taken."""
    rounds_ahead: int = 0
    """Rounds taken minus steps made. While positive, a step lowers this, and neither starts nor awaits a round."""
    synchronized: int = 0
    """Number of the last synchronization's last round: all ranks take rounds up to it before they go on."""
    training: tuple[int, ...] | None = None
    """The ranks that were not synchronizing in the last round; None for all."""
    exited: tuple[int, ...] = ()
    """The ranks that exited in the very last round: once no rank goes on and some exit, no other round follows."""

    @property
    def is_round_running(self) -> bool:
        """True if a round has begun and not ended."""
        return self.service in (Service.HELPING, Service.CONTRIBUTING)

    @property
    def rounds_begun(self) -> int:
        """Number of rounds that have begun."""
        return self.rounds_ended + self.is_round_running

    @property
    def may_arrive(self) -> bool:
        """True if the program may hand in a gradient: false while a round reads the last one."""
        return self.service != Service.CONTRIBUTING

    @property
    def may_take(self) -> bool:
        """True if the program has what it waits for."""
        if self.activity == Activity.WAITING:
            return self.rounds_ended > self.taken and not self.is_round_running
        return self.activity != Activity.COMPUTING

    @property
    def initiator(self) -> int:
        """The rank that starts the next round when it comes; this rank, if any rank that comes first does."""
        if self.policy == "solo":
            return self.rank
        candidates = self.training or range(self.size)
        draw = np.random.default_rng((self.seed, self.rounds_ended + 1)).integers(len(candidates))
        return candidates[int(draw)]

    # Events of the program, which may come in any activity: an exception may have ended the program's last call.

    def arrived(self) -> Transition:
        """Take note that the program has handed in a gradient; only while it `may_arrive`."""
        assert self.may_arrive
        if self.rounds_begun > self.taken:  # it is late: its round has begun without it
            return replace(self, handed_in=Presence.STALE, activity=Activity.WAITING), ()
        if self.rounds_ahead:
            return replace(self, handed_in=Presence.STALE, activity=Activity.COMPUTING)._after_step(rounds=0), ()
        start = (self._activation(),) if self.initiator == self.rank else ()
        return replace(self, handed_in=Presence.FRESH, activity=Activity.WAITING), start

    def overdue(self) -> Transition:
        """Start the round from this rank: the program has waited too long, and the drawn rank may not come."""
        assert self.activity == Activity.WAITING
        return self, (self._activation(),) if self.rounds_begun == self.taken else ()

    def took(self) -> Transition:
        """Take note that the program has taken the rounds that have ended; only while it `may_take`."""
        assert self.may_take
        last = self.synchronized if self.activity == Activity.SYNCHRONIZED else self.rounds_ended
        after = replace(self, taken=last)
        if self.activity == Activity.WAITING:
            after = replace(after, activity=Activity.COMPUTING)._after_step(rounds=last - self.taken)
        elif self.activity == Activity.SYNCHRONIZED:
            after = replace(after, activity=Activity.COMPUTING, rounds_ahead=0)
        return after._released()

    def synchronizes(self, exits: bool) -> Transition:
        """Let the program wait for all ranks; one more round tells them. If it exits, no gradients follow."""
        after = replace(self, activity=Activity.EXITING if exits else Activity.SYNCHRONIZING)
        return after._released() if self.service == Service.HELD else (after, (self._activation(),))

    # Events of rounds.

    def activated(self, number: int) -> Transition:
        """Take a signal while no round is under way. Signals of past rounds are ignored."""
        assert self.service == Service.IDLE
        if number != self.rounds_ended + 1:
            return self, ()
        held, begin = replace(self, service=Service.HELD)._released()
        return held, (Signal(self._neighbours(), number), *begin)

    def gave_up(self) -> Transition:
        """Begin a held round that has waited for the program too long, so that all ranks fail."""
        assert self.service == Service.HELD
        return self._begun(Presence.GIVEN_UP)

    def ended(self, activities: Sequence[Activity]) -> Transition:
        """Take note that the round has ended. The activities are all ranks', as they were when the round began."""
        assert self.is_round_running
        training = tuple(rank for rank, activity in enumerate(activities) if activity.goes_on)
        after = replace(self, service=Service.IDLE, rounds_ended=self.rounds_ended + 1, training=training or None)
        if training:
            return after, ()
        exiting = tuple(rank for rank, activity in enumerate(activities) if activity == Activity.EXITING)
        return replace(after, activity=Activity.SYNCHRONIZED, synchronized=after.rounds_ended,
                       exited=exiting), ()

    # Steps that events have in common.

    def _after_step(self, rounds: int) -> RankState:
        """Count one step, which has taken this number of rounds: it was due one, and is ahead by the rest."""
        if self.training is not None and len(self.training) < self.size:  # who was ahead may be gone
            return replace(self, rounds_ahead=0)
        return replace(self, rounds_ahead=min(max(0, self.rounds_ahead + rounds - 1), self.max_staleness))

    def _released(self) -> Transition:
        if self.service != Service.HELD:
            return self, ()
        if self.activity.goes_on and self.rounds_ended - self.taken >= self.max_staleness:
            return self, ()
        return self._begun(self.handed_in)

    def _begun(self, presence: Presence) -> Transition:
        service = Service.CONTRIBUTING if self.handed_in else Service.HELPING
        after = replace(self, service=service, handed_in=Presence.ABSENT)
        return after, (BeginRound(after.rounds_begun, presence, self.activity, self.rounds_ended - self.taken),)

    def _activation(self) -> Signal:
        return Signal((self.rank,), self.rounds_begun + 1)

    def _neighbours(self) -> tuple[int, ...]:
        """Return the ranks that this rank tells of a round: all know it in ⌈log₂ P⌉ hops, whichever ranks began."""
        return tuple((self.rank + (1 << hop)) % self.size for hop in range((self.size - 1).bit_length()))
