"""The private names of other packages that this integration needs; it uses no others.

SEEN has the versions in which they were seen, NAMES what a test looks for when one changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from torch.autograd import profiler

SEEN = {"horovod": "0.28.1", "torch": "2.13"}
NAMES = (
    "horovod.torch.mpi_ops:_basics.MPI_LIB_CTYPES.horovod_shutdown",
    "torch:Tensor._indices",
    "torch:Tensor._values",
    "torch.autograd.profiler:_is_profiler_enabled",
)
"""Modules and what is in them. Of objects: `_handlers` of an elastic TorchState, `_optimizer_step_post_hooks`."""
SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""An attribute of fused optimizers: GradScaler then calls `step` whatever it has found."""


def library() -> Any:
    """Return Horovod's C library; whatever name a program calls, its functions are called in the end."""
    return hvd.mpi_ops._basics.MPI_LIB_CTYPES


def trained_by(state: Any) -> list[Any]:
    """Return an elastic state's models and optimizers; a state may have samplers, too."""
    values = [handler.value for handler in state._handlers.values()]
    return [value for value in values if isinstance(value, torch.nn.Module | torch.optim.Optimizer)]


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sparse gradient: int64, shape (m,); a row may come twice."""
    return gradient._indices()[0]


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse gradient, by its rows; all of a dense one."""
    return gradient._values() if gradient.is_sparse else gradient


def come_first(optimizer: torch.optim.Optimizer, hook: Any) -> None:
    """Have the hook of this handle, which runs after steps, run before all others."""
    optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]


def span(name: str) -> AbstractContextManager[Any]:
    """Return a range of this name, if a profiler is on; without one, record_function would still take 10 µs."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()
