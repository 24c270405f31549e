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
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def watch(transport: MPITransport, world_rank: int, members: tuple[int, ...], meet: Callable[[], None],
          parent: MPITransport | None = None) -> None:
    """Has the watchdog of this process watch the transport; see Watchdog.watch."""
    global _watchdog
    if _watchdog is None:
        from .watchdog import StallLimits, Watchdog
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
        _request(f"rank {rank} {reason}".encode())


def explain(error: Exception) -> str:
    """The text of a failure of Horovod's collectives, after which rank has ended, if that is known."""
    ended = _request(None) if _rendezvous() is not None else None
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


def _leave_at_exit() -> None:
    error = getattr(sys, "last_value", None)
    if error is None:
        leave("has come to the end of its program, while others go on: all ranks must take the same number of steps")
    else:
        leave(f"has ended with {type(error).__name__}: {str(error)[:300]}")


def _rendezvous() -> str | None:
    """The address of the rendezvous server; None where there is none, or in an elastic job."""
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if not address or not port or os.environ.get("HOROVOD_ELASTIC") == "1":
        return None
    return f"http://{address}:{port}/{SCOPE}/ended"


def _request(text: bytes | None) -> str | None:
    """Leaves the text with the server, if nobody has done so before, or reads what is there."""
    try:
        with urllib.request.urlopen(str(_rendezvous()), timeout=TIMEOUT) as answer:
            return str(answer.read().decode())
    except OSError:  # nothing is there yet, or no server any more
        pass
    if text is not None:
        try:
            urllib.request.urlopen(urllib.request.Request(str(_rendezvous()), text, method="PUT"), timeout=TIMEOUT)
        except OSError as error:
            logger.debug("the rendezvous server could not be told that this rank ends: %s", error)
    return None
