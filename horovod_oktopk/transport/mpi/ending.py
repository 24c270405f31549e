"""Notice of a rank's end before it shuts Horovod down: watchdogs tell each other which rank has ended, and how."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from ..ending import EARLY, note_status, unhappy_end
from ..stalls import StallLimits

if TYPE_CHECKING:  # mpi4py is imported only where MPI runs
    from .watchdog import Watchdog

_watchdog: Watchdog | None = None


def watchdog(world_rank: int, world_size: int) -> Watchdog:
    """Return the watchdog of this process."""
    global _watchdog
    if _watchdog is None:
        from .watchdog import Watchdog
        _watchdog = Watchdog(world_rank, world_size, StallLimits.of_horovod())
        atexit.register(_leave_at_exit)  # after hvd.init, so before Horovod's own shutdown
        note_status()
    return _watchdog


def leave(reason: str) -> None:
    """End this process's communication. Call it before Horovod is shut down.

    The reason is the text that the others get about this rank: "has ended".
    """
    if _watchdog is not None:
        _watchdog.stop(reason)


def _leave_at_exit() -> None:
    leave(unhappy_end() or EARLY)
