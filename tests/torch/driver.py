"""PyTorch: hvd.DistributedOptimizer around SGD."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from horovod_oktopk import PluginError
from horovod_oktopk.schemes.report import StepReport
from tests.scenarios import SETS
from tests.scenarios.common import SHAPES
from tests.scenarios.driver import Gradients
from tests.torch.library import (
    catch_up,
    gather_state_dict,
    hvd,
    set_density,
    shared_parameters,
    step_report,
    synchronize_replicas,
)


def start(process_sets: list[Any]) -> None:
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # more are added by scenarios
    hvd.init(process_sets=process_sets)
    torch.set_num_threads(1)


def seed(value: int) -> None:
    torch.manual_seed(value)


class Kind:
    """See tests.scenarios.driver."""

    hvd = hvd
    op_error = PluginError
    sets = SETS
    saves_together = False
    route = "Horovod's collectives, as Horovod does not run on MPI"

    @property
    def collectives(self) -> Any:
        from horovod_oktopk.torch.horovod import TorchTransport
        return TorchTransport

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def runs_partial(self) -> bool:
        return bool(hvd.mpi_enabled())

    def supports(self, argument: str) -> bool:
        return True

    def __call__(self, compression: Any, dtype: str = "float32", shapes: Any = None, lr: float = 1.0,
                 momentum: float = 0.0, normalizes: bool = False, **arguments: Any) -> TorchTrainer:
        optimizer = Normalizing if normalizes else torch.optim.SGD
        return TorchTrainer(optimizer, compression, dtype, shapes or SHAPES, lr, momentum, arguments)

    def passes(self, trainer: TorchTrainer, several: list[Gradients]) -> None:
        trainer.optimizer.zero_grad()
        for grads in several:
            trainer.backward(grads)
        trainer.optimizer.step()

    def rewrite(self, path: str, residuals: list[np.ndarray]) -> None:
        state = torch.load(path, weights_only=True)
        record = state["horovod_oktopk"][0]
        state["horovod_oktopk"] = [{**record, "rank": rank, "size": len(residuals), "process": "another",
                                    "residual": torch.from_numpy(residual)}
                                   for rank, residual in enumerate(residuals)]
        torch.save(state, path)


class Normalizing(torch.optim.SGD):
    normalizes_gradients = True


class TorchTrainer:
    """See tests.scenarios.driver."""

    def __init__(self, optimizer: Any, compression: Any, dtype: str, shapes: Any, lr: float, momentum: float,
                 arguments: dict[str, Any]) -> None:
        self.dtype = getattr(torch, dtype)
        self.params = {name: torch.nn.Parameter(torch.zeros(shape, dtype=self.dtype))
                       for name, shape in shapes.items()}
        if isinstance(arguments.get("groups"), list):
            arguments["groups"] = [[self.params[name] for name in group] for group in arguments["groups"]]
        self.optimizer = hvd.DistributedOptimizer(optimizer(self.params.values(), lr=lr, momentum=momentum),
                                                  named_parameters=self.params.items(), compression=compression,
                                                  **arguments)

    def step(self, grads: Gradients) -> None:
        self.optimizer.zero_grad()
        self.backward(grads)
        self.optimizer.step()

    def backward(self, grads: Gradients) -> None:
        loss = sum((self.params[name] * torch.from_numpy(g).to(self.dtype)).sum() for name, g in grads.items())
        loss.backward()

    def values(self) -> dict[str, np.ndarray]:
        with shared_parameters(self.optimizer):
            return self.own_values()

    def own_values(self) -> dict[str, np.ndarray]:
        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        return {name: p.detach().to(wide).numpy().copy() for name, p in self.params.items()}

    def report(self) -> StepReport | None:
        return step_report(self.optimizer)

    def residual(self) -> np.ndarray:
        return self.optimizer.state_dict()["horovod_oktopk"][0]["residual"].numpy()

    def save(self, path: str) -> None:
        state = gather_state_dict(self.optimizer)
        if hvd.rank() == 0:
            torch.save(state, path)
        hvd.allgather_object("saved")

    def load(self, path: str) -> None:
        with shared_parameters(self.optimizer):
            self.optimizer.load_state_dict(torch.load(path, weights_only=True))

    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def catch_up(self) -> None:
        catch_up(self.optimizer)

    def synchronize_replicas(self) -> None:
        synchronize_replicas(self.optimizer)

    def set_density(self, density: float) -> None:
        set_density(self.optimizer, density)

    def assign(self, values: Gradients) -> None:
        with shared_parameters(self.optimizer):
            for name, value in values.items():
                self.params[name].data.copy_(torch.from_numpy(value))
