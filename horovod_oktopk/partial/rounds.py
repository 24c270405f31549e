"""Partial allreduce (Li et al., PPoPP 2020): a round runs without those who have not come, and without their help.

*Solo*: whoever comes first starts the round for all. *Majority*: a rank that is drawn anew for every round does, so
that half of the ranks, on average, have come. Each rank has a thread that serves rounds; they start together as an
activation spreads, and what a round reduces, and how, is the caller's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import numpy as np

from ..errors import OptionError, TransportError

if TYPE_CHECKING:
    from ..transport.base import Signals, Transport

T = TypeVar("T")
Policy = Literal["solo", "majority"]

BREATH = 0.05
"""Seconds for which a thread waits for a signal before it looks whether it is to end."""

HEADER = 6
"""Numbers that a rank tells the others when a round begins, before its settings."""


class Presence(IntEnum):
    """What a rank is to a round."""

    ABSENT = 0
    """It has not come since the last one, and contributes nothing."""
    STALE = 1
    """It came too late for the last one, and contributes what it had then."""
    FRESH = 2
    """It has come, waits for this round, and contributes."""
    GIVEN_UP = 3


class Parting(IntEnum):
    """Whether a rank serves rounds until all are here."""

    NOT = 0
    FOR_NOW = 1
    FOR_GOOD = 2


@dataclass(frozen=True)
class Round(Generic[T]):
    """One round, as all ranks know it."""

    number: int
    """From 1."""
    presences: tuple[Presence, ...]
    """By rank."""
    staleness: tuple[int, ...]
    """By rank: how many rounds had begun that it had not seen."""
    busy: tuple[float, ...]
    """By rank: seconds that its steps took which it has ended since the round before, without any waiting."""
    seconds: float
    """Since the round before, on rank 0."""
    settings: tuple[float, ...]
    """Those with which it was run: of the first of the ranks that had come for it, or that contributed."""
    outcome: T | None
    """None where nobody had anything to contribute: then nothing was run."""

    @property
    def active(self) -> int:
        """How many ranks had come for this round."""
        return self.presences.count(Presence.FRESH)

    @property
    def seconds_saved(self) -> float:
        """By how much sooner this round came than if every step had waited for the slowest; negative where later."""
        return max(self.busy) - self.seconds


class PartialAllreduce(Generic[T]):
    """Rounds of one reduction among the ranks; one object on each rank.

    run: reduces once over the transport, in this object's thread; it is told whether this rank has come, and if not,
        contributes nothing; and the round's settings. All ranks run each round, in the same order.
    settings: how many numbers there are of them.
    seed: of the draws of "majority"; the same on all ranks.
    max_staleness: how many rounds may have begun that a rank has not seen; the next waits for it.
    patience: for how many seconds, before it fails on all ranks; and after which a round is started without the rank
        that was drawn.
    Raises OptionError for another policy.
    """

    def __init__(self, policy: Policy, run: Callable[[bool, tuple[float, ...]], T], transport: Transport,
                 signals: Signals, settings: int = 0, seed: int = 0, max_staleness: int = 16,
                 timeout: float = 600.0) -> None:
        if policy not in get_args(Policy):
            raise OptionError(f"policy must be one of {get_args(Policy)}; got {policy!r}")
        self.policy = policy
        self._run = run
        self._transport = transport
        self._signals = signals
        self._seed = seed
        self._max_staleness = max_staleness
        self._timeout = timeout
        self._changed = threading.Condition()
        # Under the condition's lock:
        self._has_come = self._waits = self._contributes = self._ended = False
        self._parting = Parting.NOT
        self._started = self._finished = self._taken = 0
        self._closing = 0  # the last round of the last parting
        self._gone: list[int] = []  # who parted for good in it, where others did not
        self._ahead = 0  # by how many the rounds that this rank has seen exceed its steps
        self._left = self._began = time.monotonic()
        self._busy = 0.0
        self._settings = (0.0,) * settings
        self._rounds: list[Round[T]] = []
        self._candidates: tuple[int, ...] = tuple(range(transport.size))
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="horovod_oktopk.partial", daemon=True)
        self._thread.start()

    def arrive(self, contribute: Callable[[], Sequence[float]]) -> list[Round[T]]:
        """This rank has come: what it has is handed in, and all rounds that it has not seen are returned, in order.

        contribute: makes this rank's values ready for the next `run`, and gives its settings for that round; called
        while none runs with this rank's.
        There is one round for a step: a rank that comes when that has begun without it is late, takes what there is,
        perhaps nothing, and what it has handed in waits for the next round. Any other waits for its round, and starts
        it where the policy says so. Raises what a round raised, and TransportError where ranks have parted for good.
        """
        busy = time.monotonic() - self._left
        with self._changed:
            self._check_all_are_there()
            self._busy += busy
            self._wait_for(lambda: not self._contributes)
            self._settings = tuple(contribute())
            self._has_come = True
            unseen = self._started > self._taken
            self._waits = not unseen and not self._ahead
            if self._waits and self._initiates():
                self._activate(self._taken + 1)
            self._changed.notify_all()  # a round may wait for this rank
            if unseen or self._waits:
                self._wait_for_round()
            rounds = self._take(self._finished)
            self._ahead = min(max(0, self._ahead + len(rounds) - 1), self._max_staleness)
            if len(self._candidates) < self._transport.size:  # those that were ahead may be gone
                self._ahead = 0
        self._left = time.monotonic()
        return rounds

    def part(self, for_good: bool = False) -> Iterator[list[Round[T]]]:
        """Serves rounds until all ranks are here as well; yields those that this rank has not seen, as they end.

        Then all have the same rounds, and all that was handed in has been in one. To be exhausted. What it yields may
        be empty: so whoever waits for several can take turns. for_good: before `end`; a rank that comes once more
        learns of it by an error.
        """
        if for_good and self._gone:  # so nothing has come since
            return
        with self._changed:
            self._check_all_are_there()
            self._parting = Parting.FOR_GOOD if for_good else Parting.FOR_NOW
            self._activate(self._started + 1)  # a last round, in which the others learn it
            self._changed.notify_all()
        parting = True
        while parting:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._failure or self._rounds or not self._parting), BREATH)
                self._check()
                parting = bool(self._parting)
                rounds = self._take(self._finished if parting else self._closing)
            yield rounds
        self._left, self._ahead = time.monotonic(), 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No round runs inside."""
        with self._changed:
            self._wait_for(lambda: self._started == self._finished)
            yield

    def end(self) -> None:
        """Ends the thread; after `part`, when no rank needs it any more."""
        with self._changed:
            self._ended = True
        self._thread.join()

    # Under the lock.

    def _initiates(self) -> bool:
        """Whether this rank, which has come, is to start the next round."""
        if self.policy == "solo":
            return True
        draw = np.random.default_rng((self._seed, self._finished + 1)).integers(len(self._candidates))
        return self._candidates[int(draw)] == self._transport.rank

    def _wait_for_round(self) -> None:
        def has_ended() -> bool:
            return self._finished > self._taken and self._finished == self._started

        self._changed.wait_for(lambda: self._failure is not None or has_ended(), self._timeout)
        if self._started == self._taken and self._failure is None:  # the drawn rank does not come
            self._activate(self._taken + 1)
        self._wait_for(has_ended)

    def _take(self, last: int) -> list[Round[T]]:
        """The rounds up to this number."""
        count = last - self._taken
        rounds, self._rounds = self._rounds[:count], self._rounds[count:]
        self._taken, self._waits = last, False
        self._changed.notify_all()
        return rounds

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_all_are_there(self) -> None:
        self._check()
        if self._gone:
            raise TransportError(f"ranks {self._gone} have ended (hvd.shutdown, or the end of the program) where "
                                 "this one goes on, and serve no more rounds: all ranks must call "
                                 "synchronize_replicas equally often")

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or condition())
        self._check()

    def _activate(self, number: int) -> None:
        self._signals.send(self._transport.rank, number)

    # The thread.

    def _serve(self) -> None:
        try:
            while self._await_activation():
                self._serve_round()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _await_activation(self) -> bool:
        """Waits until the next round is started, here or elsewhere, and passes it on. False: there will be none."""
        following = self._finished + 1
        while not self._ended:
            if self._signals.receive(BREATH) == following:  # others are of rounds that have been
                self._spread(following)
                return True
        return False

    def _spread(self, number: int) -> None:
        """In ⌈log₂ P⌉ hops all know it, whoever and however many began."""
        rank, size = self._transport.rank, self._transport.size
        for hop in range((size - 1).bit_length()):
            self._signals.send((rank + (1 << hop)) % size, number)

    def _serve_round(self) -> None:
        with self._changed:
            presence = self._begin_round()
            parting = self._parting
            now = time.monotonic()
            times = [round(1e9 * self._busy), round(1e9 * (now - self._began))]
            header = [self._started, presence, parting, self._started - 1 - self._taken, *times]
            settings, self._busy, self._began = self._settings, 0.0, now
        rows = self._transport.allgather(np.concatenate([np.array(header, np.int64), _as_integers(settings)]))
        self._compare(rows)
        first = int(rows[:, 1].argmax())
        chosen = tuple(rows[first, HEADER:].copy().view(np.float64).tolist())
        outcome = self._run(self._contributes, chosen) if rows[first, 1] else None
        with self._changed:
            self._finished += 1
            self._contributes = False
            self._rounds.append(Round(self._finished, tuple(map(Presence, rows[:, 1].tolist())),
                                      tuple(rows[:, 3].tolist()), tuple((rows[:, 4] / 1e9).tolist()),
                                      float(rows[0, 5] / 1e9), chosen, outcome))
            self._note_parting(rows[:, 2], announced=parting)
            self._changed.notify_all()

    def _begin_round(self) -> Presence:
        """Settles what this rank is to the round; waits where too many have begun that it has not seen."""
        is_here = self._changed.wait_for(
            lambda: self._started - self._taken < self._max_staleness or bool(self._parting) or self._ended,
            self._timeout)
        self._started += 1
        self._contributes, self._has_come = self._has_come, False
        if not is_here:
            return Presence.GIVEN_UP
        if self._contributes:
            return Presence.FRESH if self._waits else Presence.STALE
        return Presence.ABSENT

    def _compare(self, rows: np.ndarray[Any, Any]) -> None:
        if (rows[:, 0] != rows[0, 0]).any():
            raise TransportError(f"the ranks are in different rounds: {rows[:, 0].tolist()}")
        gone = np.flatnonzero(rows[:, 1] == Presence.GIVEN_UP).tolist()
        if gone:
            raise TransportError(f"ranks {gone} have not come for {self._max_staleness} rounds, and then for "
                                 f"{self._timeout:g} s; before a collective of its own, or where it has no more "
                                 "steps to take, a rank must serve the others' rounds (synchronize_replicas)")

    def _note_parting(self, parting: np.ndarray[Any, Any], announced: Parting) -> None:
        remaining: Sequence[int] = np.flatnonzero(parting == Parting.NOT).tolist()
        self._candidates = tuple(remaining) or tuple(range(self._transport.size))
        if not remaining:
            if (parting == Parting.FOR_NOW).any():
                self._gone = np.flatnonzero(parting == Parting.FOR_GOOD).tolist()
            self._parting, self._closing = Parting.NOT, self._finished
        elif self._parting and not announced:
            self._activate(self._finished + 1)


def _as_integers(settings: Sequence[float]) -> np.ndarray[Any, Any]:
    """The same bits."""
    return np.array(settings, np.float64).view(np.int64)
