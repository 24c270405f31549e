"""The seconds of a stall, and notice of a call that waits for long in a library's collective."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

logger = logging.getLogger("horovod_oktopk")

WARN_AFTER = 60.0
"""Seconds of waiting after which a stall is reported, if the environment does not say."""
LOOK = 0.5
"""Seconds between two looks at the calls that wait."""
STALLED = ("stalled: %s has waited for %.0f s for other ranks to come to a reduction; "
           "HOROVOD_STALL_CHECK_TIME_SECONDS is %g. All ranks must take the same number of steps: a rank that leaves "
           "one out by its own judgement keeps the others waiting. See where the ranks stand (py-spy dump), or raise "
           "the variable if such waits are normal; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends a job that waits")
LAST_LOOK = 5.0
"""Seconds for which the end of the process waits for a look that has begun."""
_looking = threading.Lock()
_waiting: dict[int, tuple[float, Callable[[float], None]]] = {}
"""By thread: since when it waits, by time.monotonic, and what looks at it."""


class StallLimits(NamedTuple):
    """Horovod's settings, in seconds; 0 is never."""

    warning: float
    shutdown: float

    @classmethod
    def of_horovod(cls) -> StallLimits:
        """Read the variables that Horovod and `horovodrun` know."""
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(0.0, 0.0)
        return cls(float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or WARN_AFTER),
                   float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0))

    def end_of_wait(self, timeout: float) -> float:
        """Return the seconds after which to end a wait that would otherwise end after `timeout`."""
        return min(timeout, self.shutdown or timeout)


class StallWarning:
    """Warnings of one call that waits in Horovod: after its limit for stalls, and again after each such time.

    `who` names the rank that waits, in words.
    """

    def __init__(self, who: str) -> None:
        self._who, self._limit, self._told = who, StallLimits.of_horovod().warning, 0.0

    def note_wait(self, waited: float) -> None:
        """Warn if it is time to; `waited` is in seconds."""
        if self._limit and waited > self._told + self._limit:
            self._told = waited
            logger.warning(STALLED, self._who, waited, self._limit)


@contextmanager
def noticed(look: Callable[[float], None]) -> Iterator[None]:
    """Have `look` called while the block runs, about every LOOK seconds, with the seconds that it has run."""
    _watch()
    thread = threading.get_ident()
    _waiting[thread] = time.monotonic(), look
    try:
        yield
    finally:
        del _waiting[thread]


@functools.cache  # once in a process
def _watch() -> None:
    # Python ends a thread that comes back from C++ after the interpreter by terminating the process.
    atexit.register(_looking.acquire, timeout=LAST_LOOK)
    threading.Thread(target=_look_at_all, name="horovod_oktopk.stalls", daemon=True).start()


def _look_at_all() -> None:
    while True:
        time.sleep(LOOK)
        with _looking:
            for since, look in _waiting.copy().values():
                look(time.monotonic() - since)
