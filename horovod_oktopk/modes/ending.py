"""The end of all modes of this process, before Horovod ends."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from ..transport.ending import leave, unhappy_end
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
        if unhappy_end() is None:
            _wait_for_other_sets(hvd)
        return shutdown(*args, **kwargs)

    library.horovod_shutdown = wrapped


def _wait_for_other_sets(hvd: Any) -> None:
    """Wait until all ranks come here, if there are process sets, or one of them shuts Horovod down.

    That ends MPI on all ranks, also on those of a process set that shares no rank with this one's, and still trains.
    """
    if not hvd.is_initialized() or not hvd.mpi_enabled():
        return
    if len(hvd.mpi_ops._basics._get_process_set_ids_and_ranks()) > 1:
        with suppress(Exception):  # of the framework; Horovod is at its end
            hvd.allgather_object(None, name="horovod_oktopk.end")
