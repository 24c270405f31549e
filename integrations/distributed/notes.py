"""Notes of the ranks of a group in the job's store: how one has ended, and which one is waited for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from horovod_oktopk.errors import OptionError
from horovod_oktopk.transport.ending import LEFT
from horovod_oktopk.transport.stalls import WARN_AFTER

logger = logging.getLogger("horovod_oktopk")

LOOK = 3.0
"""Seconds for which a rank looks for the others' notes after a failure: they may end a little later."""
PAUSE = 0.1
"""Seconds between two looks."""
ARRIVED = 1.0
"""Seconds of waiting after which a rank notes that it has arrived: a step that waits for less notes nothing."""
STALL_SECONDS = "OKTOPK_STALL_SECONDS"
STALLED = ("stalled: ranks %s have waited for %.0f s for ranks %s to come to a reduction. All ranks must take the "
           "same number of steps: a rank that leaves one out by its own judgement keeps the others waiting. See "
           f"where the ranks stand (py-spy dump), or set {STALL_SECONDS} (now %g; 0: never) if such waits are normal")
LATE = ("ranks {missing} have not come to a reduction within the timeout of the process group "
        "(dist.init_process_group(timeout=...)): they stand still, or take fewer steps")


def stall_seconds() -> float:
    """Return the seconds of waiting after which a warning follows, from the environment; 0 is never."""
    given = os.environ.get(STALL_SECONDS, WARN_AFTER)
    try:
        seconds = float(given)
        if seconds >= 0:
            return seconds
    except ValueError:
        pass
    raise OptionError(f"{STALL_SECONDS} must be a number of seconds, 0 or more; got {given!r}")


class Notes:
    """The notes of one group. The store holds no other's keys; `rank` is this rank's number in the group."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.stall_seconds = store, rank, stall_seconds()
        self._others_failed = False

    def leave(self, how: str) -> None:
        """Note how this rank has ended: "has ended with ...". If it ends because of another rank, it is no cause."""
        if self._others_failed:
            return
        try:
            self.store.set(f"ended.{self.store.add('ended', 1)}", f"rank {self.rank} {how}")
        except RuntimeError:  # the process that has the store is gone, and whoever would read this, too
            return

    def ended(self) -> list[str]:
        """Return how ranks have ended, in words, as soon as there is such a note; [] if none comes."""
        self._others_failed = True
        until = time.monotonic() + LOOK
        try:
            while not (found := self._found()) and time.monotonic() < until:
                time.sleep(PAUSE)
        except RuntimeError:
            return []
        return found

    def _found(self) -> list[str]:
        return [self.store.get(f"ended.{number}").decode() for number in range(1, self.store.add("ended", 0) + 1)
                if self.store.check([f"ended.{number}"])]


class Call:
    """A channel's call of this number, on this rank. The first rank that waits names members that have not come."""

    def __init__(self, notes: Notes, channel: str, number: int, members: Sequence[int]) -> None:
        self._notes, self._store, self._members = notes, notes.store, members
        self._channel, self._number = channel, number
        self._has_arrived, self._told = False, 0.0

    def note_wait(self, waited: float) -> None:
        """Note that this rank has arrived; warn if it is time to. `waited` is in seconds."""
        limit = self._notes.stall_seconds
        try:
            if limit and waited > min(ARRIVED, limit / 2) and not self._has_arrived:
                self._store.set(f"{self._channel}.{self._notes.rank}", str(self._number))  # over the last one's
                self._has_arrived = True
            if limit and waited > self._told + limit:
                self._told = waited
                self._warn(waited)
        except RuntimeError:  # the store is gone: the call itself fails soon
            return

    def _warn(self, waited: float) -> None:
        missing = self._missing()
        here = [rank for rank in self._members if rank not in missing]
        if missing and self._notes.rank == here[0]:
            logger.warning(STALLED, here, waited, missing, self._notes.stall_seconds)

    def _missing(self) -> list[int]:
        keys = {rank: f"{self._channel}.{rank}" for rank in self._members}
        return [rank for rank, key in keys.items()
                if not self._store.check([key]) or int(self._store.get(key)) < self._number]

    def explain(self, error: Exception) -> str:
        """Return the text of this call's failure, after its cause: ranks that have ended, or that have not come."""
        found = "; ".join(self._notes.ended())
        if not found and self._has_arrived and "Timed out" in str(error) and (missing := self._missing()):
            found = LATE.format(missing=missing)
        return f"{found or LEFT}. {error}"
