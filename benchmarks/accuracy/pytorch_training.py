"""Trains a model in PyTorch, by any scheme: what the programs in PyTorch share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.accuracy.training import Results, Statistics, make_parser
from horovod_oktopk import Dense, GaussianK, GTopk, OkTopk, Partial, SameBlocks, StepAhead, TopkA, TopkDSA
from horovod_oktopk.schemes.report import StepReport

SCHEMES = {"oktopk": OkTopk, "topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk, "gaussiank": GaussianK,
           "sameblocks": SameBlocks}
OPTIMIZERS = ("sgd", "adamw")
Schedule = torch.optim.lr_scheduler.LRScheduler


class Task(Protocol):
    """Model and data. metric: the name of what `evaluate` returns."""

    metric: str

    def batches(self, epoch: int) -> Collection[Any]:
        """Return this rank's batches of one epoch; every rank has equally many."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor: ...

    def evaluate(self, model: nn.Module) -> tuple[float, int]:
        """Return the sum of the metric over this rank's part of the validation set, and the size of this part."""


@dataclass(frozen=True)
class Setup:
    """One training, on one rank. by_step: the schedule of the learning rate goes on after every step, not epoch."""

    task: Task
    model: nn.Module
    schedule: Callable[[torch.optim.Optimizer], Schedule]
    by_step: bool = False


class Distributed(Protocol):
    """An optimizer whose steps all ranks take together."""

    optimizer: torch.optim.Optimizer
    """Optimizer whose learning rate the schedule sets."""

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...

    def catch_up(self) -> None:
        """Apply the exchange under way, if there is one."""

    def report(self) -> StepReport | None:
        """Return the report of the last exchange."""

    def set_density(self, density: float | None) -> None: ...

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds what all ranks share."""


class Ranks(Protocol):
    """Ranks of a Horovod job, or threads; the first three methods are Horovod's own."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allgather_object(self, value: Any) -> list[Any]: ...

    def own_randomness(self) -> AbstractContextManager[None]:
        """Return a context in which PyTorch's default generator is this rank's own."""

    def distribute(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any,
                   clip: float) -> Distributed:
        """Return a distributed optimizer. clip: the norm to clip gradients to before a step; 0: leave them."""


def make_pytorch_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    parser = make_parser(description, SCHEMES, **defaults)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--beta2", type=float, default=0.999, help="of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="of AdamW")
    parser.add_argument("--clip", type=float, default=0.0, metavar="NORM",
                        help="gradients are clipped to this norm, as a program would; needs --threads")
    parser.add_argument("--density-warmup", type=int, default=0, metavar="EPOCHS",
                        help="the density falls from 25%% to --density over so many epochs")
    parser.add_argument("--value-dtype", help="of the values that are sent, as OkTopk takes it; none: as they are")
    parser.add_argument("--global-density", type=float, help="how much of the sum is kept, as OkTopk takes it")
    parser.add_argument("--step-ahead", action="store_true", help="StepAhead around the scheme")
    parser.add_argument("--ahead", type=float, help="StepAhead's coefficient")
    parser.add_argument("--gain", default="auto", help="StepAhead's gain: auto, none, or a number")
    parser.add_argument("--no-overlap", dest="overlap", action="store_false", help="StepAhead without overlap")
    parser.add_argument("--partial", choices=["solo", "majority"], help="do not wait for ranks that are late")
    parser.add_argument("--threads", type=int, metavar="RANKS",
                        help="so many ranks as threads of this process, without Horovod")
    parser.set_defaults(passes=1)
    return parser


def compression_of(arguments: argparse.Namespace) -> Any:
    """Return the compression that the arguments name."""
    scheme = SCHEMES.get(arguments.compression)
    options = {name: None if value == "none" else value for name in ("value_dtype", "global_density")
               if (value := getattr(arguments, name)) is not None}
    compression: Any = Dense() if scheme is None else scheme(density=arguments.density, **options)
    if arguments.step_ahead:
        named = {"auto": "auto", "none": None}
        gain: Any = named[arguments.gain] if arguments.gain in named else float(arguments.gain)
        compression = StepAhead(compression, ahead=arguments.ahead, overlap=arguments.overlap, gain=gain)
    return compression if arguments.partial is None else Partial(compression, policy=arguments.partial)


def optimizer_of(model: nn.Module, arguments: argparse.Namespace, size: int) -> torch.optim.Optimizer:
    """Return the user's own optimizer, which knows nothing of other ranks."""
    rate = arguments.lr * size
    if arguments.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), rate, (0.9, arguments.beta2),
                                 weight_decay=arguments.weight_decay)
    return torch.optim.SGD(model.parameters(), rate, arguments.momentum)


def warmup(density: float, epochs: int) -> list[float]:
    """Return the densities of the first epochs: from 25 %, falling by the same factor in each."""
    return [max(density, 0.25 * (density / 0.25) ** (epoch / epochs)) for epoch in range(epochs)]


class Steps:
    """Takes training steps, of so many backward passes, and keeps their statistics. after: is called after each."""

    def __init__(self, setup: Setup, ranks: Ranks, optimizer: Distributed, is_dense: bool, passes: int,
                 after: Callable[[], object]) -> None:
        self._task, self._model, self._ranks, self._optimizer = setup.task, setup.model, ranks, optimizer
        self._is_dense, self._passes, self._after = is_dense, passes, after
        self.statistics = Statistics(ranks, sum(p.numel() for p in setup.model.parameters()))

    def run(self, epoch: int) -> float:
        """Train for one epoch; return the loss of its last batch."""
        self._model.train()
        for batch in self._task.batches(epoch):
            start = time.perf_counter()
            self._optimizer.zero_grad()
            loss = self._pass_back(batch) if self._passes == 1 else self._pass_back_in_parts(batch)
            self._optimizer.step()
            self.statistics.step(time.perf_counter() - start, self._optimizer.report(), self._is_dense)
            self._after()
        return loss.item()

    def _pass_back(self, batch: Any, share: float = 1.0) -> torch.Tensor:
        """Add the gradients of this share of the step's loss; return the loss."""
        with self._ranks.own_randomness():
            loss = self._task.loss(self._model, batch)
        (loss if share == 1 else share * loss).backward()
        return loss

    def _pass_back_in_parts(self, batch: torch.Tensor) -> torch.Tensor:
        """Add the gradients of a batch's parts; half of them hide an exchange. Return the last part's loss."""
        for number, part in enumerate(batch.chunk(self._passes)):
            if number == self._passes // 2:
                self._optimizer.catch_up()
            loss = self._pass_back(part, len(part) / len(batch))
        return loss

    def evaluate(self) -> dict[str, float]:
        """Return the metric, and the bytes that the mean rank has sent so far."""
        self._model.eval()
        with torch.no_grad(), self._optimizer.shared():
            found = self._ranks.allgather_object([*self._task.evaluate(self._model), self.statistics.bytes_sent])
        total, count, sent = map(sum, zip(*found, strict=True))
        return {self._task.metric: total / count, "bytes": sent / len(found)}


def train(setup: Setup, ranks: Ranks, arguments: argparse.Namespace) -> Results:
    """Train on every rank, from the first step to the last."""
    optimizer = ranks.distribute(optimizer_of(setup.model, arguments, ranks.size()), setup.model,
                                 compression_of(arguments), arguments.clip)
    schedule = setup.schedule(optimizer.optimizer)
    first = warmup(arguments.density, arguments.density_warmup)
    densities = [*first, None] if first else []  # None: the optimizer's own again
    history: list[dict[str, float]] = []
    began = time.perf_counter()

    def after_a_step() -> None:
        if setup.by_step:
            schedule.step()
        progress.update()

    with tqdm(total=arguments.epochs * len(setup.task.batches(0)), desc=f"{arguments.compression:>9}", unit="step",
              disable=ranks.rank() != 0, mininterval=0.5) as progress:
        steps = Steps(setup, ranks, optimizer, arguments.compression == "none", arguments.passes,
                      after_a_step)
        for epoch in range(arguments.epochs):
            if epoch < len(densities):
                optimizer.set_density(densities[epoch])
            loss = steps.run(epoch)
            if not setup.by_step:
                schedule.step()
            history.append({"epoch": epoch + 1, **steps.evaluate(), "seconds": time.perf_counter() - began})
            progress.set_postfix(epoch=epoch + 1, loss=f"{loss:.3f}")
    with optimizer.shared():
        return {setup.task.metric: history[-1][setup.task.metric], "history": history,
                **steps.statistics.summary(arguments)}
