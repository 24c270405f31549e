"""The end of all modes of this process, before Horovod ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..transport.ending import leave
from .partial.mode import end_all
from .step_ahead.mode import close_all


def wrap_shutdown(hvd: Any, forget: Callable[[], None] = lambda: None) -> None:
    """Wrap the shutdown of Horovod's C library, so that rounds, exchanges and messages of this process end first.

    Whatever name a program calls, that function is called in the end. PyTorch's shutdown drops the handles of all
    operations before, also of those of an exchange. `forget` is called then, too.
    """
    def end() -> None:
        end_all()
        close_all()
        forget()

    def end_and_leave() -> None:
        end()
        leave("has called hvd.shutdown(), while others go on: call it on all ranks, after the last step")

    _precede(hvd.mpi_ops._basics.MPI_LIB_CTYPES, "horovod_shutdown", end_and_leave)
    of_torch = getattr(hvd.mpi_ops, "mpi_lib", None)
    if of_torch is not None:
        _precede(of_torch, "horovod_torch_reset", end)


def _precede(library: Any, name: str, end: Callable[[], None]) -> None:
    function = getattr(library, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        end()
        return function(*args, **kwargs)

    setattr(library, name, wrapped)
