"""The ranks of a training that horovodrun has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from benchmarks.accuracy.pytorch_training import Distributed
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.torch import (
    Dense,
    catch_up,
    set_density,
    shared_parameters,
    step_report,
    synchronize_replicas,
)


class HorovodOptimizer:
    """hvd.DistributedOptimizer; model and optimizer are the same on all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any) -> None:
        self.optimizer: Any = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                                       compression=compression)
        self._is_dense = isinstance(compression, Dense)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()

    def catch_up(self) -> None:
        catch_up(self.optimizer)

    def report(self) -> StepReport | None:
        return None if self._is_dense else step_report(self.optimizer)

    def set_density(self, density: float | None) -> None:
        set_density(self.optimizer, density)

    @contextmanager
    def shared(self) -> Iterator[None]:
        synchronize_replicas(self.optimizer)  # with --partial: from here on all ranks have the same parameters
        with shared_parameters(self.optimizer):
            yield


class HorovodRanks:
    """Ranks of a Horovod job."""

    rank, size, allgather_object = staticmethod(hvd.rank), staticmethod(hvd.size), staticmethod(hvd.allgather_object)

    def own_randomness(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: a process has a random generator of its own."""
        return nullcontext()

    def distribute(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any,
                   clip: float) -> Distributed:
        assert not clip, "on threads only"
        return HorovodOptimizer(optimizer, model, compression)


def start() -> HorovodRanks:
    """Start Horovod."""
    hvd.init()
    return HorovodRanks()
