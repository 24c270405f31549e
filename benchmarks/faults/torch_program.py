"""A PyTorch training whose ranks may go wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import horovod.torch as hvd
import torch

from benchmarks.faults.inject import Injector
from benchmarks.faults.plans import EPOCHS, Plan
from horovod_oktopk.torch import (
    OkTopk,
    Partial,
    StepAhead,
    gather_state_dict,
    shared_parameters,
    synchronize_replicas,
)

SCHEMES = {"gradients": OkTopk(density=0.05), "step-ahead": StepAhead(OkTopk(density=0.05)),
           "partial": Partial(OkTopk(density=0.05))}


class Program:
    """The model, its optimizer, and what is done with them."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._plan = plan
        self._model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 10))
        self._optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9),
                                                   named_parameters=self._model.named_parameters(),
                                                   compression=SCHEMES[plan.mode])
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)

    def train(self, injector: Injector, path: Path) -> str | None:
        """Train for all epochs; save the state to `path` after the first one, and return the error if that fails."""
        failure = None
        data = torch.Generator().manual_seed(1 + hvd.rank())
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
        state = gather_state_dict(self._optimizer)
        if hvd.rank() == 0:
            try:
                with injector.saving():
                    torch.save(state, path)
            except (OSError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
        return None

    def digest(self) -> tuple[str, bool]:
        """Return the digest of what all ranks share, and True if all of it is finite."""
        if self._plan.mode == "partial":
            synchronize_replicas(self._optimizer)
        with shared_parameters(self._optimizer):
            values = torch.cat([p.detach().flatten() for p in self._model.parameters()])
        return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16], bool(values.isfinite().all())
