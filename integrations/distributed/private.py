"""The private names of torch.distributed that this integration needs; it uses no others.

SEEN has the version in which they were seen, NAMES what a test looks for when it changes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SEEN = {"torch": "2.13"}
NAMES = ("torch.distributed:distributed_c10d._get_default_store", "torch.distributed:ProcessGroup._get_backend",
         "torch.distributed:ProcessGroup._device_types")
"""Modules and what is in them. Of objects: `_comm_hooks` of DistributedDataParallel; `_timeout` of options;
`_fsdp_flattened` of parameters."""


def default_store() -> Any:
    """Return the store of the default process group; None if its backend has none."""
    return dist.distributed_c10d._get_default_store()


def timeout_of(process_group: Any) -> Any:
    """Return how long the operations of a process group may take, a timedelta."""
    return process_group._get_backend(process_group._device_types[0]).options._timeout


def is_flattened(p: torch.Tensor) -> bool:
    """Return True for a parameter of FullyShardedDataParallel, flat or a view of a flat one's shard."""
    return bool(getattr(p, "_fsdp_flattened", False))


def hooks_of(model: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the (communication hook, state) pairs of a model in DDP; those of the original, if it is a copy."""
    hooks: list[tuple[Any, Any]] = model._comm_hooks
    return hooks
