"""Trains a model in PyTorch with Horovod, by any scheme: what the programs in PyTorch share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

import horovod.torch as hvd
import torch
from torch import nn
from tqdm import tqdm

from benchmarks.accuracy.training import Results, Statistics, make_parser
from horovod_oktopk.torch import (
    Dense,
    DensitySchedule,
    GaussianK,
    GTopk,
    OkTopk,
    Partial,
    TopkA,
    TopkDSA,
    step_report,
    synchronize_replicas,
)

SCHEMES = {"oktopk": OkTopk, "topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk, "gaussiank": GaussianK}
Schedule = torch.optim.lr_scheduler.LRScheduler


class Task(Protocol):
    """What is trained. metric: the name of what `evaluate` returns, on all ranks together."""

    metric: str

    def batches(self, epoch: int) -> Collection[Any]:
        """This rank's, of one epoch; every rank has as many."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor: ...

    def evaluate(self, model: nn.Module) -> float: ...


def make_pytorch_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    parser = make_parser(description, SCHEMES, **defaults)
    parser.add_argument("--density-warmup", type=int, default=0, metavar="EPOCHS",
                        help="the density falls from 25%% to --density over so many epochs")
    parser.add_argument("--partial", choices=["solo", "majority"], help="do not wait for ranks that are late")
    return parser


def distribute(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """SGD with the compression that the arguments name; model and optimizer are the same on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=arguments.momentum)
    scheme = SCHEMES.get(arguments.compression)
    compression = Dense() if scheme is None else scheme(density=arguments.density)
    if arguments.partial is not None:
        compression = Partial(compression, policy=arguments.partial)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def warmup(density: float, epochs: int) -> Callable[[int], float | None]:
    """The density falls from 25 % by the same factor in every epoch; after the last of them it is the optimizer's."""
    return lambda epoch: max(density, 0.25 * (density / 0.25) ** (epoch / epochs)) if epoch < epochs else None


class Steps:
    """Takes training steps, and keeps their statistics. after: is called after each."""

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, compressed: bool,
                 after: Callable[[], object]) -> None:
        self._task, self._model, self._optimizer, self._compressed = task, model, optimizer, compressed
        self._after = after
        self.statistics = Statistics(hvd, sum(p.numel() for p in model.parameters()))

    def run(self, epoch: int) -> float:
        """One epoch; the loss of its last batch."""
        self._model.train()
        for batch in self._task.batches(epoch):
            start = time.perf_counter()
            self._optimizer.zero_grad()
            loss = self._task.loss(self._model, batch)
            loss.backward()
            self._optimizer.step()
            self.statistics.step(time.perf_counter() - start,
                                 step_report(self._optimizer) if self._compressed else None)
            self._after()
        return loss.item()


def train(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, by_step: bool,
          arguments: argparse.Namespace) -> Results:
    """A whole training. by_step: the learning rate's schedule goes on after every step, not after every epoch."""
    compressed = arguments.compression != "none"
    by_epoch = warmup(arguments.density, arguments.density_warmup)
    densities = DensitySchedule(optimizer, by_epoch) if compressed else None
    history: list[dict[str, float]] = []
    began = time.perf_counter()
    with tqdm(total=arguments.epochs * len(task.batches(0)), desc=f"{arguments.compression:>9}", unit="step",
              disable=hvd.rank() != 0, mininterval=0.5) as progress:
        steps = Steps(task, model, optimizer, compressed,
                      lambda: (schedule.step() if by_step else None, progress.update()))
        for epoch in range(arguments.epochs):
            loss = steps.run(epoch)
            synchronize_replicas(optimizer)  # with --partial: from here on all ranks have the same parameters
            if not by_step:
                schedule.step()
            if densities is not None:
                densities.step()
            model.eval()
            with torch.no_grad():
                value = task.evaluate(model)
            history.append({"epoch": epoch + 1, task.metric: value, "seconds": time.perf_counter() - began})
            progress.set_postfix(epoch=epoch + 1, loss=f"{loss:.3f}")
    return {task.metric: value, "history": history, **steps.statistics.summary(arguments)}
