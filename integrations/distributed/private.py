"""The private names of torch.distributed that this integration needs; it uses no others.

SEEN has the version in which they were seen, NAMES what a test looks for when it changes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SEEN = {"torch": "2.13"}
NAMES = ("torch.distributed:distributed_c10d._get_default_store",)
"""Modules and what is in them. Of objects: `_comm_hooks` of DistributedDataParallel."""


def default_store() -> Any:
    """Return the store of the default process group; None if its backend has none."""
    return dist.distributed_c10d._get_default_store()


def hooks_of(model: DistributedDataParallel) -> list[Any]:
    """Return the communication hooks of a model in DDP."""
    return [hook for hook, _ in model._comm_hooks]
