"""Partial allreduce (Li et al., PPoPP 2020): a round runs without the ranks that are late, and without their help.

*Solo*: the first rank that comes starts the round for all. *Majority*: a rank that is drawn for each round does, so
half of the ranks, on average, have come. Each rank has a thread that serves rounds. They start together as an
activation spreads. The caller says what a round reduces, and how; `states.py` decides what happens when.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import TransportError
from ...transport.base import Signals, Transport
from .states import Activity, BeginRound, Policy, Presence, RankState, Service, Transition

Headers = NDArray[np.void]

BREATH = 0.05
"""Seconds for which a thread waits for a signal before it looks whether it is to end."""
ALONE = ("rank %d has waited for %g s in synchronize_replicas, and another rank has neither come nor taken a step; "
         "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is set to that. Call synchronize_replicas on all ranks equally often")


@dataclass(frozen=True)
class Round:
    """One round, as all ranks know it."""

    number: int
    """From 1."""
    presences: tuple[Presence, ...]
    """By rank."""
    staleness: tuple[int, ...]
    """Numbers of begun rounds that a rank had not seen, by rank."""
    busy: tuple[float, ...]
    """Seconds of the steps that a rank has ended since the round before, without any waiting; by rank."""
    seconds: float
    """Seconds since the round before, on rank 0."""
    settings: tuple[float, ...]
    """Settings of the first rank that had come for this round; if none had, of the first that contributed."""
    outcome: Any
    """The result of `run`; None if no rank contributed: then nothing was run."""

    @property
    def seconds_saved(self) -> float:
        """Seconds saved against steps that all wait for the slowest rank; negative if the round came later."""
        return max(self.busy) - self.seconds


class PartialAllreduce:
    """Rounds of one reduction among the ranks; one object on each rank. `Partial` describes policy, seed, and so on.

    Args:
        run: reduces once over the transport, in this object's thread. It gets True if this rank contributes, and the
            round's settings. All ranks run each round, in the same order.
        settings: number of values that each rank gives with a contribution.
        patience: seconds without any round for which `synchronize` waits for the other ranks.
        when_over: called in the thread when no round follows: some ranks have exited, and no rank goes on.
    """

    def __init__(self, policy: Policy, run: Callable[[bool, tuple[float, ...]], Any], transport: Transport,
                 signals: Signals, settings: int = 0, seed: int = 0, max_staleness: int = 16,
                 timeout: float = 600.0, patience: float = math.inf,
                 when_over: Callable[[], None] = lambda: None) -> None:
        self._run = run
        self._transport = transport
        self._signals = signals
        self._timeout, self._patience = timeout, patience
        self._when_over = when_over
        self._is_dropped = False
        self._changed = threading.Condition()
        # Under the condition's lock:
        self.state = RankState(transport.rank, transport.size, policy, seed, max_staleness)
        self._rounds: list[Round] = []  # that have ended, and were not taken
        self._failure: BaseException | None = None
        self._is_over = False
        # What this rank tells at the beginning of a round, the next or the one under way; busy, elapsed in seconds.
        self._header = np.zeros(1, [("number", np.int64), ("presence", np.int64), ("activity", np.int64),
                                    ("staleness", np.int64), ("busy", np.float64), ("elapsed", np.float64),
                                    ("settings", np.float64, (settings,))])
        self._last_return = self._last_begin = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="horovod_oktopk.partial", daemon=True)
        self._thread.start()

    def arrive(self, contribute: Callable[[], Sequence[float]]) -> list[Round]:
        """Hand in this rank's values; return all rounds that this rank has not seen, in order.

        `contribute` makes this rank's values ready for the next `run`, and returns its settings; it is called while
        no round reads them. There is one round for a step. A rank is late if its step's round has begun without it. A
        late rank takes the rounds that there are, perhaps none, and its values wait for the next round. Any other
        rank waits for its round, and starts the round if the policy says so. Raise the error of a round;
        TransportError if ranks have exited.
        """
        busy = time.monotonic() - self._last_return
        with self._changed:
            self._check_all_are_there()
            self._header["busy"] += busy
            self._wait_for(lambda: self.state.may_arrive)
            self._header["settings"] = contribute()
            self._do(self.state.arrived())
            rounds = []
            if self.state.activity == Activity.WAITING:
                if not self._wait_for(lambda: self.state.may_take, self._timeout):
                    self._do(self.state.overdue())
                    self._wait_for(lambda: self.state.may_take)
                rounds = self._new_rounds()
        self._last_return = time.monotonic()
        return rounds

    def synchronize(self, for_good: bool = False) -> Iterator[list[Round]]:
        """Serve rounds until all ranks are here; yield the rounds that this rank has not seen, as they end.

        Then all ranks have the same rounds, and all values handed in have been in a round. The caller must exhaust
        the iterator. If `for_good`, this rank exits, and `end` follows. Ranks that still train get an error at their
        next call, instead of waiting.
        """
        with self._changed:
            if for_good and self.state.exited:  # so nothing has come since
                return
            self._check_all_are_there()
            if self.state.activity != Activity.EXITING:
                self._do(self.state.synchronizes(exits=for_good))
        last = time.monotonic()
        while self.state.activity != Activity.COMPUTING:
            with self._changed:
                self._wait_for(lambda: bool(self._rounds or self.state.activity == Activity.SYNCHRONIZED), BREATH)
                rounds = self._new_rounds()
            last = time.monotonic() if rounds else last
            if time.monotonic() > last + self._patience:
                raise TransportError(ALONE % (self._transport.rank, self._patience))
            yield rounds
        self._last_return = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run no round inside the block."""
        with self._changed:
            self._wait_for(lambda: not self.state.is_round_running)
            yield

    def end(self) -> None:
        """End the thread; after `synchronize`, if no rank needs it any more."""
        with self._changed:
            self._is_over = True
        self._thread.join()

    def drop(self) -> None:
        """Exit in place of the program, which has let go of the object that uses this one.

        The thread exits as by `synchronize` for good, and ends when no rank goes on. This call only sets a flag: the
        garbage collector may call it in the midst of anything.
        """
        self._is_dropped = True

    # Under the lock.

    def _do(self, transition: Transition) -> None:
        """Make a transition of the state, and its actions; a round that is to run begins in the thread."""
        self.state, actions = transition
        for action in actions:
            if isinstance(action, BeginRound):
                now = time.monotonic()
                for name, value in vars(action).items():
                    self._header[name] = value
                self._header["elapsed"], self._last_begin = now - self._last_begin, now
            else:
                for rank in action.ranks:
                    self._signals.send(rank, action.number)
        self._changed.notify_all()

    def _new_rounds(self) -> list[Round]:
        before = self.state.taken
        self._do(self.state.took())
        count = self.state.taken - before
        rounds, self._rounds = self._rounds[:count], self._rounds[count:]
        return rounds

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_all_are_there(self) -> None:
        self._check()
        if self.state.exited:
            raise TransportError(f"ranks {list(self.state.exited)} have ended (hvd.shutdown, or the end of the "
                                 "program), or dropped their optimizer, while this one goes on: call "
                                 "synchronize_replicas equally often on all ranks")

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for the condition; return True if it came true in time. Raise the error of a round."""
        came_true = self._changed.wait_for(lambda: self._failure is not None or condition(), timeout)
        self._check()
        return came_true

    # The thread.

    def _serve(self) -> None:
        try:
            while self._await_activation():
                self._serve_round()
            self._when_over()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _await_activation(self) -> bool:
        """Wait until the next round is activated, here or elsewhere; return False if there will be none."""
        while not self._is_over and not self.state.exited:
            number = self._signals.receive(BREATH)
            with self._changed:
                if number is not None:
                    self._do(self.state.activated(number))
                self._exit_if_dropped()
                if self.state.service != Service.IDLE:
                    return True
        return False

    def _exit_if_dropped(self) -> None:
        if self._is_dropped and self.state.activity != Activity.EXITING:
            self._do(self.state.synchronizes(exits=True))

    def _serve_round(self) -> None:
        header = self._begin()
        headers = self._transport.allgather(header.view(np.int64)).view(header.dtype)[:, 0]  # of all ranks
        self._compare(headers)
        presences = headers["presence"]
        first = int(presences.argmax())
        settings = tuple(headers["settings"][first].tolist())
        contributes = self.state.service == Service.CONTRIBUTING
        outcome = self._run(contributes, settings) if presences[first] else None
        number, seconds = self.state.rounds_begun, float(headers["elapsed"][0])
        with self._changed:
            if not self._is_dropped:
                self._rounds.append(Round(number, tuple(map(Presence, presences.tolist())),
                                          tuple(headers["staleness"].tolist()), tuple(headers["busy"].tolist()),
                                          seconds, settings, outcome))
            self._do(self.state.ended([Activity(activity) for activity in headers["activity"]]))

    def _begin(self) -> Headers:
        """Wait until the round may start; return this rank's header for the others."""
        last = time.monotonic() + self._timeout
        with self._changed:
            while not self._changed.wait_for(lambda: self.state.is_round_running, BREATH):
                if self._is_dropped:
                    self._exit_if_dropped()
                elif time.monotonic() > last:
                    self._do(self.state.gave_up())
            header = self._header.copy()
            self._header["busy"] = 0
        return header

    def _compare(self, headers: Headers) -> None:
        numbers = headers["number"]
        if (numbers != numbers[0]).any():
            raise TransportError(f"the ranks are in different rounds: {numbers.tolist()}")
        gone = np.flatnonzero(headers["presence"] == Presence.GIVEN_UP).tolist()
        if gone:
            raise TransportError(f"ranks {gone} have not come for {self.state.max_staleness} rounds, and then "
                                 f"for {self._timeout:g} s: call synchronize_replicas on all ranks before "
                                 "collectives of your own, and when a rank has no more steps to take")
