"""The private names of Horovod that this integration needs; it uses no others.

SEEN has the version in which they were seen, NAMES what a test looks for when it changes.
"""

from __future__ import annotations

from typing import Any

import torch

SEEN = {"horovod": "0.28.1"}
NAMES = ("horovod.torch.mpi_ops:_basics.MPI_LIB_CTYPES.horovod_shutdown", "horovod.torch.mpi_ops:_allreduce_async")
"""Modules and what is in them. Of objects: `_handlers` of an elastic TorchState."""


def trained_by(state: Any) -> list[Any]:
    """Return an elastic state's models and optimizers; a state may have samplers, too."""
    values = [handler.value for handler in state._handlers.values()]
    return [value for value in values if isinstance(value, torch.nn.Module | torch.optim.Optimizer)]
