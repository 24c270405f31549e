"""The end of this process, in words for the other ranks, and its watchdog, which tells them over MPI."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from .stalls import StallLimits

if TYPE_CHECKING:  # mpi4py is imported only where MPI runs
    from .mpi.watchdog import Watchdog

LEFT = ("a rank has left the job: it was killed, has ended early or by an error, or has shut its communication down "
        "(hvd.shutdown, dist.destroy_process_group); the launcher's output tells which. Look for the first traceback "
        "there")
EARLY = ("has come to the end of its program, or has left it, while others go on: all ranks must take the same "
         "number of steps")
_exit_status: object = None
"""The last argument of `sys.exit`."""
_watchdog: Watchdog | None = None


@functools.cache  # once in a process
def note_status() -> None:
    """Wrap sys.exit to keep its status, which Python does not tell when the process ends.

    `raise SystemExit` goes unnoticed.
    """
    leave_program: Callable[..., NoReturn] = sys.exit

    @functools.wraps(leave_program)
    def wrapped(status: object = None, /) -> NoReturn:
        global _exit_status
        if threading.current_thread() is threading.main_thread():
            _exit_status = status
        leave_program(status)

    sys.exit = wrapped


def unhappy_end() -> str | None:
    """Return how this process ends, in words for the other ranks, if it ends by an error; None if all is well."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # also in whose handling it ends
    if error is not None and not isinstance(error, SystemExit):
        return f"has ended with {type(error).__name__}: {str(error)[:300]}"
    return f"has ended by sys.exit({_exit_status!r}): let all ranks end together" if _exit_status else None


def watchdog(world_rank: int, world_size: int) -> Watchdog:
    """Return the watchdog of this process, which uses MPI."""
    global _watchdog
    if _watchdog is None:
        from .mpi.watchdog import Watchdog
        _watchdog = Watchdog(world_rank, world_size, StallLimits.of_horovod())
        atexit.register(lambda: leave(unhappy_end() or EARLY))  # after hvd.init, so before Horovod's own shutdown
        note_status()
    return _watchdog


def leave(reason: str) -> None:
    """End this process's communication over MPI, if there is any. Call it before Horovod is shut down.

    The reason is the text that the others get about this rank: "has ended".
    """
    if _watchdog is not None:
        _watchdog.stop(reason)
