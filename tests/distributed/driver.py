"""PyTorch without Horovod: the optimizers of horovod_oktopk.distributed around SGD, under torchrun."""

from __future__ import annotations

import sys
from typing import Any

import torch

from horovod_oktopk.distributed.groups import GroupTransport
from tests.distributed.hvd import hvd
from tests.torch import driver
from tests.torch.driver import seed

__all__ = ["Kind", "hvd", "seed", "start"]


def start(process_sets: list[Any]) -> None:
    hvd.init(process_sets)
    torch.set_num_threads(1)
    assert not any(name.partition(".")[0] in ("horovod", "mpi4py") for name in sys.modules)


class Kind(driver.Kind):
    route = "Gloo, as torch.distributed has started this job, and not `horovodrun --mpi`"
    collectives = GroupTransport
