"""A PyTorch training whose ranks may go wrong."""

from __future__ import annotations

import datetime
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import launch
from benchmarks.faults.inject import Injector
from benchmarks.faults.plans import EPOCHS, STALL_SHUTDOWN, Plan
from horovod_oktopk import OkTopk, Partial, StepAhead

DENSITY = 0.05
MODES: dict[str, Callable[[Any], Any]] = {"gradients": lambda scheme: scheme, "step-ahead": StepAhead,
                                          "partial": Partial}


class Program:
    """The model, its optimizer, and what is done with them."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._plan = plan
        self._model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 10))
        self._optimizer: Any = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)
        if plan.network == "torchrun":
            dist = importlib.import_module("torch.distributed")
            seconds = STALL_SHUTDOWN if plan.fault == "freeze" else 120
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
            self._plugin = importlib.import_module("horovod_oktopk.distributed")
        else:
            importlib.import_module("horovod.torch").init()
            self._plugin = importlib.import_module("horovod_oktopk.torch")
        self._rank = launch.rank()

    def _distribute(self, density: float) -> None:
        compression = MODES[self._plan.mode](OkTopk(density=density))
        if self._plan.network == "torchrun":
            self._plugin.DistributedOptimizer(self._optimizer, self._model.named_parameters(), compression)
            return
        hvd = importlib.import_module("horovod.torch")
        hvd.DistributedOptimizer(self._optimizer, named_parameters=self._model.named_parameters(),
                                 compression=compression)
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)

    def train(self, injector: Injector, path: Path) -> str | None:
        """Train for all epochs; save the state to `path` after the first one, and return the error if that fails."""
        self._distribute(injector.density(DENSITY))
        failure = None
        data = torch.Generator().manual_seed(1 + self._rank)
        for epoch in range(EPOCHS):
            for step in range(injector.steps):
                x = torch.randn(8, 20, generator=data)
                if step == injector.nan_step:
                    x = x * torch.nan
                self._step(x, injector, epoch * injector.steps + step)
            if epoch == 0:
                failure = self._save(path, injector)
        injector.finish()
        return failure

    def _step(self, x: torch.Tensor, injector: Injector, number: int) -> None:
        optimizer = self._optimizer
        optimizer.zero_grad()
        injector.before_step(number)
        torch.nn.functional.cross_entropy(self._model(x), torch.arange(8)).backward()
        if self._plan.mode != "gradients":
            optimizer.step()
            return
        optimizer.synchronize()
        if all(p.grad.isfinite().all() for p in self._model.parameters() if p.grad is not None):
            with optimizer.skip_synchronize():
                optimizer.step()

    def _save(self, path: Path, injector: Injector) -> str | None:
        state = self._plugin.gather_state_dict(self._optimizer)
        if self._rank == 0:
            try:
                with injector.saving():
                    torch.save(state, path)
            except (OSError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
        return None

    def digest(self) -> tuple[str, bool]:
        """Return the digest of what all ranks share, and True if all of it is finite."""
        if self._plan.mode == "partial":
            self._plugin.synchronize_replicas(self._optimizer)
        with self._plugin.shared_parameters(self._optimizer):
            values = torch.cat([p.detach().flatten() for p in self._model.parameters()])
        return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16], bool(values.isfinite().all())
