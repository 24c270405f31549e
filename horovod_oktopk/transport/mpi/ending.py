"""A rank that ends says so before it shuts Horovod down: the others get an error, and nobody hangs.

Over MPI the watchdogs tell each other which rank it was. Horovod's own collectives fail by themselves, without that.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..stalls import StallLimits

if TYPE_CHECKING:  # mpi4py is imported only where MPI runs
    from .transport import MPITransport
    from .watchdog import Watchdog

_watchdog: Watchdog | None = None
_exit_status: object = None
"""What `sys.exit` was called with last."""
SHUT_DOWN = "Horovod has been shut down"
"""In the text of what Horovod raises when a rank has gone."""
LEFT = ("a rank has left the job: it was killed, has ended early or by an error, or has called hvd.shutdown(); the "
        "launcher's output tells which")


def watch(transport: MPITransport, world_rank: int, members: tuple[int, ...], meet: Callable[[], None],
          parent: MPITransport | None = None) -> None:
    """Has the watchdog of this process watch the transport; see Watchdog.watch."""
    global _watchdog
    if _watchdog is None:
        from .watchdog import Watchdog
        _watchdog = Watchdog(world_rank, StallLimits.of_horovod())
        atexit.register(_leave_at_exit)  # after hvd.init, so before Horovod's own shutdown
        sys.exit = _noting_status(sys.exit)
    _watchdog.watch(transport, members, meet, parent)


def leave(reason: str) -> None:
    """This process communicates no more. To be called before Horovod is shut down.

    reason: what the others are told that this rank has done: "has ended".
    """
    if _watchdog is not None:
        _watchdog.stop(reason)


def unhappy_end() -> str | None:
    """How this process ends, where it is not as it should: for the others. None where all is well."""
    error = _error()
    if error is not None:
        return f"has ended with {type(error).__name__}: {str(error)[:300]}"
    return f"has ended by sys.exit({_exit_status!r})" if _exit_status else None


def explain(error: Exception) -> str:
    """Return the text of a failure of Horovod's collectives; where a rank has left the job, it says so first."""
    return f"{LEFT}. {error}" if SHUT_DOWN in str(error) else str(error)


def before_shutdown(shutdown: Callable[..., Any]) -> Callable[..., Any]:
    """Horovod's shutdown, before which this process leaves."""
    @functools.wraps(shutdown)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leave("has called hvd.shutdown(), while others go on")
        return shutdown(*args, **kwargs)

    return wrapped


def _leave_at_exit() -> None:
    leave(unhappy_end() or "has come to the end of its program, or has left it, while others go on: all ranks must "
                           "take the same number of steps")


def _noting_status(leave_program: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """sys.exit, of which Python tells nothing when the process ends; `raise SystemExit` goes unnoticed."""
    @functools.wraps(leave_program)
    def wrapped(status: object = None, /) -> NoReturn:
        global _exit_status
        if threading.current_thread() is threading.main_thread():
            _exit_status = status
        leave_program(status)

    return wrapped


def _error() -> BaseException | None:
    """The exception with which the program ends, or in whose handling it shuts Horovod down."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
