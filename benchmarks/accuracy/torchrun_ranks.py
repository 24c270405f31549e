"""The ranks of a training that torchrun has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.accuracy.pytorch_training import Distributed
from horovod_oktopk.distributed import (
    Dense,
    DistributedOptimizer,
    broadcast_parameters,
    catch_up,
    set_density,
    shared_parameters,
    step_report,
)
from horovod_oktopk.schemes.report import StepReport


class OurOptimizer:
    """A DistributedOptimizer of this package; the model is the same on all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any) -> None:
        self.optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()

    def catch_up(self) -> None:
        catch_up(self.optimizer)

    def report(self) -> StepReport | None:
        return step_report(self.optimizer)

    def set_density(self, density: float | None) -> None:
        set_density(self.optimizer, density)

    def shared(self) -> AbstractContextManager[None]:
        return shared_parameters(self.optimizer)


class DenseOptimizer(OurOptimizer):
    """The mean of whole gradients, by one allreduce of torch.distributed after the backward pass."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer, self._parameters = optimizer, list(model.parameters())

    def step(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        flat = torch.cat([each.reshape(-1) for each in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()

    def report(self) -> None:
        return None

    def set_density(self, density: float | None) -> None:
        assert density is None

    @contextmanager
    def shared(self) -> Iterator[None]:
        yield


class TorchrunRanks:
    """Ranks of a job of torchrun."""

    rank, size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)

    def allgather_object(self, value: Any) -> list[Any]:
        everyone = [None] * self.size()
        dist.all_gather_object(everyone, value)
        return everyone

    def own_randomness(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: a process has a random generator of its own."""
        return nullcontext()

    def distribute(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any,
                   clip: float) -> Distributed:
        assert not clip, "on threads only"
        broadcast_parameters(model)
        return (DenseOptimizer(optimizer, model) if isinstance(compression, Dense)
                else OurOptimizer(optimizer, model, compression))


def start() -> TorchrunRanks:
    """Start torch.distributed; once in a process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return TorchrunRanks()
