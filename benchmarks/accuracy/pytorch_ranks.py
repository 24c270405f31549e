"""Ranks of a training: in a Horovod job, as users have them, or as threads of one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from benchmarks.accuracy.pytorch_training import Distributed, Ranks, Setup, train
from benchmarks.accuracy.thread_ranks import ThreadJob
from benchmarks.accuracy.training import Results, finish
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.torch import Dense, set_density, shared_parameters, step_report, synchronize_replicas
from horovod_oktopk.transport.base import Transport
from tests.support.threads import run_ranks

Make = Callable[[Ranks, argparse.Namespace], Setup]
LONGEST_STEP = 600.0
"""Seconds for which threads wait for each other."""


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


def run(make: Make, shown: str, parser: argparse.ArgumentParser,
        line: list[str] | None) -> None:
    """Run a whole program. make: one rank's setup; the model is the same on all ranks, as the seed is.

    shown: what was reached, with the metric to be filled in.
    """
    arguments = parser.parse_args(line)
    if arguments.clip and not (arguments.threads and arguments.compression in ("none", "oktopk")):
        parser.error("--clip works on ranks that are threads, with oktopk or none: give --threads")
    if arguments.threads:
        results = train_on_threads(make, arguments)
    else:
        hvd.init()
        results = _train(HorovodRanks(), make, arguments)
    if arguments.threads or hvd.rank() == 0:
        finish(results, shown.format(**results), arguments.json)


def train_on_threads(make: Make, arguments: argparse.Namespace) -> Results:
    """Return the results of a training whose ranks are threads of this process."""
    def program(transport: Transport) -> Results:
        return _train(ThreadJob(transport), make, arguments)

    return run_ranks(arguments.threads, program, LONGEST_STEP)[0]


def _train(ranks: Ranks, make: Make, arguments: argparse.Namespace) -> Results:
    torch.set_num_threads(1)
    with ranks.own_randomness():
        torch.manual_seed(arguments.seed)
        setup = make(ranks, arguments)
        torch.manual_seed(arguments.seed * ranks.size() + ranks.rank())  # every rank has dropout masks of its own
    return train(setup, ranks, arguments)
