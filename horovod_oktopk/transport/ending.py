"""A rank that ends says so before it shuts Horovod down: the others get an error that names it, and nobody hangs.

Over MPI the watchdogs tell each other. Horovod's collectives fail by themselves when a rank ends; which rank it was,
jobs on Gloo learn from their rendezvous server.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .stalls import StallLimits

if TYPE_CHECKING:  # mpi4py is imported only where MPI runs
    from .mpi import MPITransport
    from .watchdog import Watchdog

logger = logging.getLogger("horovod_oktopk")

SCOPE = "horovod_oktopk"
TIMEOUT = 2.0
"""Seconds for the rendezvous server to answer."""

_watchdog: Watchdog | None = None
_rank: int | None = None
"""The rank that this process would announce to the rendezvous server."""
_exit_status: object = None
"""What `sys.exit` was called with last."""
_was_told = False
"""Whether this rank has had an error from others: it announces none then."""
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The rendezvous server is the launcher's, whatever proxies there are."""

OF_OTHERS = ("HorovodInternalError", "TransportError")
"""Errors whose cause is another rank."""
SHUT_DOWN = "Horovod has been shut down"
"""In the text of what Horovod raises when a rank has gone."""
UNKNOWN = ("another rank has gone without a word: killed, ended by os._exit, or cut off; the launcher's output may "
           "tell which")


def watch(transport: MPITransport, world_rank: int, members: tuple[int, ...], meet: Callable[[], None],
          parent: MPITransport | None = None) -> None:
    """Has the watchdog of this process watch the transport; see Watchdog.watch."""
    global _watchdog
    if _watchdog is None:
        from .watchdog import Watchdog
        _watchdog = Watchdog(world_rank, StallLimits.of_horovod())
        _at_exit()
    _watchdog.watch(transport, members, meet, parent)


def announce_to_rendezvous(rank: int) -> None:
    """When this process ends, the rendezvous server learns its rank, if there is such a server, and the job is not
    elastic: there ranks come and go."""
    global _rank
    if _rendezvous() is not None and _rank is None:
        _rank = rank
        _at_exit()


def leave(reason: str) -> None:
    """This process communicates no more. To be called before Horovod is shut down.

    reason: what the others are told that this rank has done: "has ended".
    """
    global _rank
    if _watchdog is not None:
        _watchdog.stop(reason)
    if _rank is not None:
        rank, _rank = _rank, None
        if not _was_told and not _is_of_others(_error()):  # whoever caused it has told so, or nobody knows
            _request(f"rank {rank} {reason}".encode())


def unhappy_end() -> str | None:
    """How this process ends, where it is not as it should: for the others. None where all is well."""
    error = _error()
    if error is not None:
        return f"has ended with {type(error).__name__}: {str(error)[:300]}"
    return f"has ended by sys.exit({_exit_status!r})" if _exit_status else None


def explain(error: Exception) -> str:
    """The text of a failure of Horovod's collectives, after which rank has ended, if that is known."""
    global _was_told
    _was_told = True
    ended = _request(None) if _rendezvous() is not None else None
    if ended is None and _rendezvous() is not None and SHUT_DOWN in str(error):
        ended = UNKNOWN
    return str(error) if ended is None else f"{ended}. {error}"


def before_shutdown(shutdown: Callable[..., Any]) -> Callable[..., Any]:
    """Horovod's shutdown, before which this process leaves."""
    @functools.wraps(shutdown)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leave("has called hvd.shutdown(), while others go on")
        return shutdown(*args, **kwargs)

    return wrapped


def _at_exit() -> None:
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)  # after hvd.init, so before Horovod's own shutdown
    if not hasattr(sys.exit, "__wrapped__"):
        sys.exit = _noting_status(sys.exit)


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


def _is_of_others(error: BaseException | None) -> bool:
    """Whether this rank is a victim: of what another rank did, it would be blamed itself."""
    while error is not None:
        if type(error).__name__ in OF_OTHERS or SHUT_DOWN in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _rendezvous() -> str | None:
    """The address of the rendezvous server; None where there is none, or in an elastic job."""
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if not address or not port or os.environ.get("HOROVOD_ELASTIC") == "1":
        return None
    return f"http://{address}:{port}/{SCOPE}/ended"


def _request(text: bytes | None) -> str | None:
    """Leaves the text with the server, if nobody has done so before, or reads what is there."""
    try:
        with _direct.open(str(_rendezvous()), timeout=TIMEOUT) as answer:
            return str(answer.read().decode())
    except OSError:  # nothing is there yet, or no server any more
        pass
    if text is not None:
        try:
            _direct.open(urllib.request.Request(str(_rendezvous()), text, method="PUT"), timeout=TIMEOUT).close()
        except OSError as error:
            logger.debug("the rendezvous server could not be told that this rank ends: %s", error)
    return None
