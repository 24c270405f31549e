"""The seconds of a stall, and notice of a call that waits for long in a library's collective."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

logger = logging.getLogger("horovod_oktopk")

LOOK = 0.5
"""Seconds between two looks at the calls that wait."""
STALLED = ("stalled: %s has waited for %.0f s for other ranks to come to a reduction; "
           "HOROVOD_STALL_CHECK_TIME_SECONDS is %g. All ranks must take the same number of steps: a rank that leaves "
           "one out by its own judgement keeps the others waiting. See where the ranks stand (py-spy dump), or raise "
           "the variable if such waits are normal; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends a job that waits")
_waiting: dict[int, tuple[float, str]] = {}
"""By thread: since when it waits, by time.monotonic, and who waits, in words."""


class StallLimits(NamedTuple):
    """Horovod's settings, in seconds; 0 is never."""

    warning: float
    shutdown: float

    @classmethod
    def of_horovod(cls) -> StallLimits:
        """Read the variables that Horovod and `horovodrun` know."""
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(0.0, 0.0)
        return cls(float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60),
                   float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0))

    def patience(self, timeout: float) -> float:
        """Return the seconds after which to end a wait that would otherwise end after `timeout`."""
        return min(timeout, self.shutdown or timeout)


@contextmanager
def noticed(who: str) -> Iterator[None]:
    """Log a warning if the block takes longer than Horovod's limit for stalls, and again after each such time.

    `who` names the rank that waits, in words.
    """
    _watch()
    thread = threading.get_ident()
    _waiting[thread] = time.monotonic(), who
    try:
        yield
    finally:
        del _waiting[thread]


@functools.cache  # once in a process
def _watch() -> None:
    limit = StallLimits.of_horovod().warning
    if limit:
        threading.Thread(target=_look, args=(limit,), name="horovod_oktopk.stalls", daemon=True).start()


def _look(limit: float) -> None:
    told: dict[tuple[int, float], float] = {}  # by thread and beginning: the seconds of the last warning
    while True:
        time.sleep(LOOK)
        present = [(thread, since, who) for thread, (since, who) in _waiting.copy().items()]
        told = {(thread, since): told.get((thread, since), 0.0) for thread, since, _ in present}
        for thread, since, who in present:
            waited = time.monotonic() - since
            if waited > told[thread, since] + limit:
                told[thread, since] = waited
                logger.warning(STALLED, who, waited, limit)
