"""The end of all modes of this process, before Horovod ends."""

from __future__ import annotations

import functools
from typing import Any

from ..transport.ending import leave
from .partial.mode import end_all
from .step_ahead.mode import close_all


def wrap_shutdown(hvd: Any) -> None:
    """Wrap the shutdown of Horovod's C library, so that rounds, exchanges and messages of this process end first.

    Whatever name a program calls, that function is called in the end.
    """
    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
    shutdown = library.horovod_shutdown

    @functools.wraps(shutdown)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        end_all()
        close_all()
        leave("has called hvd.shutdown(), while others go on: call it on all ranks, after the last step")
        return shutdown(*args, **kwargs)

    library.horovod_shutdown = wrapped
