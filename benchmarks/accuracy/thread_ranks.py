"""Ranks that are threads of one process: the package's own reduction, over its transport between threads.

Without launchers, Horovod and MPI, so that many ranks train on few cores: with the bits of a Horovod job, but that a
dense allreduce adds up in another order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.accuracy.pytorch_training import Distributed
from horovod_oktopk import Dense
from horovod_oktopk.schemes.dense import DenseSum
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.torch_base.device import make_torch_mode
from horovod_oktopk.torch_base.hyperparameters import scaled_learning_rates
from horovod_oktopk.torch_base.tensors import DenseGradients, OwnGradients, TorchLayout
from horovod_oktopk.transport.base import Transport
from tests.support.ranks import ThreadRanks

_one_at_a_time = threading.Lock()


class ThreadJob:
    """One thread's view of all; the Ranks of a training."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._generator = torch.get_rng_state()

    def rank(self) -> int:
        return self._transport.rank

    def size(self) -> int:
        return self._transport.size

    def allgather_object(self, value: Any) -> list[Any]:
        message = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self._transport.allgather(np.array([len(message)]))[:, 0]
        return [json.loads(each.tobytes()) for each in self._transport.allgatherv(message, lengths)]

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Let in one thread at a time: all of them share PyTorch's generator."""
        with _one_at_a_time:
            torch.set_rng_state(self._generator)
            yield
            self._generator = torch.get_rng_state()

    def distribute(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any,
                   clip: float) -> Distributed:
        """Make a distributed optimizer like horovod_oktopk.torch; parameters are in the order of their names."""
        named = dict(sorted(model.named_parameters()))
        ranks: Any = ThreadRanks(self._transport)
        scheme = DenseSum() if isinstance(compression, Dense) else compression
        return ModeOptimizer(optimizer, named, scheme, ranks, clip)


class ModeOptimizer:
    """Takes an optimizer's steps by a mode of the package's."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], options: Any, ranks: Any,
                 clip: float) -> None:
        self.optimizer = optimizer
        self._parameters, self._clip = list(named.values()), clip
        self._layout = TorchLayout({**named})
        self._mode = make_torch_mode(options, True, self._layout, ranks, type(optimizer), [])

    def step(self) -> None:
        if not self._mode.reads_memory:
            self._mode.reduce(DenseGradients(self._layout))
        if self._clip:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for _ in range(self._mode.begin(OwnGradients(self._layout))):
            with scaled_learning_rates(self.optimizer, self._mode.coefficient, self._mode.gain):
                self.optimizer.step()
        self._mode.end()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def catch_up(self) -> None:
        self._mode.catch_up()

    def report(self) -> StepReport | None:
        return self._mode.report

    def set_density(self, density: float | None) -> None:
        self._mode.set_density(density)

    def shared(self) -> AbstractContextManager[None]:
        return self._mode.shared()
