"""Peers of this package in PyTorch, behind the interface of a training: one rank, under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.accuracy.torchrun_ranks import OurOptimizer, TorchrunRanks
from horovod_oktopk.distributed import OkTopk, OkTopkState, SameBlocks, StepAhead, oktopk_hook
from horovod_oktopk.phases.volume import dense_volume

PASSES = 4
"""Passes that are accumulated; and local steps between two averages of the model."""
LOCAL_FROM = 100
"""Steps of LocalSGD with whole gradients, before those on each rank alone."""
EARLY = 2
"""The step from which PowerSGD compresses, in place of its default, 1,000: the earliest with error feedback."""


class Sent(NamedTuple):
    """The bytes of a step, which were computed: 2(P-1)/P times those that an allreduce adds up."""

    bytes_sent: float


class Peer:
    """A model in DDP, with its optimizer. A derived class says what is sent."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        assert isinstance(model, DistributedDataParallel)
        self.optimizer, self.model, self.steps = optimizer, model, 0
        self.n = sum(p.numel() for p in model.parameters())

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.steps += 1
        self.optimizer.step()

    def words(self) -> float:
        """Return the words that the last step has added up over the ranks."""
        return float(self.n)

    def catch_up(self) -> None:
        """Do nothing: no exchange is under way between steps."""

    def report(self) -> Any:
        return Sent(4.0 * dense_volume(1, dist.get_world_size()) * self.words())

    def set_density(self, density: float | None) -> None:
        assert density is None

    @contextmanager
    def shared(self) -> Iterator[None]:
        yield


class Halves(Peer):
    """Gradients in float16."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, model)
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def words(self) -> float:
        return self.n / 2


class PowerSGD(Peer):
    """PowerSGD of this rank, from this step on."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, rank: int, start: int = 1000) -> None:
        super().__init__(optimizer, model)
        self._start = start
        self._state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        self._counted = 0
        self.model.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)

    def words(self) -> float:
        before, self._counted = self._counted, self._state.total_numel_after_compression
        return float(self._counted - before if self.steps > self._start else self.n)


class Accumulated(Peer):
    """A step of the mean gradient of several passes."""

    def zero_grad(self) -> None:
        if self.steps % PASSES == 0:
            self.optimizer.zero_grad()
        self.model.require_backward_grad_sync = self.steps % PASSES == PASSES - 1

    def step(self) -> None:
        self.steps += 1
        if self.steps % PASSES == 0:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad /= PASSES
            self.optimizer.step()

    def words(self) -> float:
        return float(self.n) if self.steps % PASSES == 0 else 0.0


class LocalSGD(Peer):
    """Steps on each rank alone, and a mean of the models now and then."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, start: int = LOCAL_FROM) -> None:
        super().__init__(optimizer, model)
        self._start, (alone, _) = start, dist.new_subgroups(1)
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start)
        self.model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        self._local: Any = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(PASSES, start))

    def step(self) -> None:
        self.steps += 1
        self._local.step()

    def words(self) -> float:
        return float(self.n) if self.steps <= self._start or (self.steps - self._start) % PASSES == 1 else 0.0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Have the ranks' mean in the model."""
        own = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        yield
        for p, value in zip(self.model.parameters(), own, strict=True):
            p.data.copy_(value)


class Hook(Peer):
    """The hook of this package."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, model)
        self._state = OkTopkState(None, OkTopk(density=0.01), self.model.module.named_parameters())
        self.model.register_comm_hook(self._state, oktopk_hook)

    def report(self) -> Any:
        return self._state.report


PEERS: dict[str, Callable[[torch.optim.Optimizer, nn.Module], Any]] = {
    "DDP": Peer,
    "DDP, float16": Halves,
    "PowerSGD, rank 1": lambda optimizer, model: PowerSGD(optimizer, model, 1),
    "PowerSGD, rank 4": lambda optimizer, model: PowerSGD(optimizer, model, 4),
    "PowerSGD, rank 1, from step 2": lambda optimizer, model: PowerSGD(optimizer, model, 1, EARLY),
    "PowerSGD, rank 4, from step 2": lambda optimizer, model: PowerSGD(optimizer, model, 4, EARLY),
    "DDP, 4 passes a step": Accumulated,
    "LocalSGD, 4 steps": LocalSGD,
    "OkTopk, DDP's hook": Hook,
    "StepAhead(OkTopk)": lambda optimizer, model: OurOptimizer(optimizer, model, StepAhead(OkTopk(density=0.01))),
    "StepAhead(OkTopk), 10 %": lambda optimizer, model: OurOptimizer(optimizer, model,
                                                                     StepAhead(OkTopk(density=0.1))),
    "StepAhead(SameBlocks)": lambda optimizer, model: OurOptimizer(optimizer, model, StepAhead(SameBlocks())),
}
"""By name; ours with density 1 %, if no other is named."""


class PeerRanks(TorchrunRanks):
    """Ranks of a job of torchrun, with one of the peers."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def distribute(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any, clip: float) -> Any:  # noqa: ARG002
        return PEERS[self._peer](optimizer, model)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model as this peer trains it.

        PowerSGD has one bucket: over Gloo, PyTorch's hook ends the job with an error if there are several.
        """
        if self._peer.startswith("StepAhead"):
            return model
        return DistributedDataParallel(model, bucket_cap_mb=4096 if "PowerSGD" in self._peer else None)
