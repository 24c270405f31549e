"""Ranks that are threads of one process: the package's own reduction, over its transport between threads.

Without launchers, Horovod and MPI, so that many ranks train on few cores: with the bits of a Horovod job, but that a
dense allreduce adds up in another order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.accuracy.half_gradients import HalfGradients, HalfGradientsOptimizer
from benchmarks.accuracy.momentum_correction import MomentumCorrectedOptimizer, MomentumCorrection
from benchmarks.accuracy.power_sgd import PowerSGD, PowerSGDOptimizer
from benchmarks.accuracy.pytorch_training import Distributed
from horovod_oktopk import Dense, StepAhead
from horovod_oktopk.reducer.flat import FlatReducer
from horovod_oktopk.reducer.layout import Layout
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.schemes.dense import DenseSum
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.step_ahead.noise import normalizes
from horovod_oktopk.step_ahead.reducer import StepAheadReducer
from horovod_oktopk.step_ahead.replica import HostReplica
from horovod_oktopk.torch.gradients import OwnGradients
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.numbers import lengthened
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
        """All threads share PyTorch's generator, so inside there is one of them at a time."""
        with _one_at_a_time:
            torch.set_rng_state(self._generator)
            yield
            self._generator = torch.get_rng_state()

    def distribute(self, optimizer: torch.optim.Optimizer, model: nn.Module, compression: Any,
                   clip: float) -> Distributed:
        """As horovod_oktopk.torch does, with the parameters in the order of their names."""
        named = dict(sorted(model.named_parameters()))
        ranks: Any = ThreadRanks(self._transport)
        if isinstance(compression, MomentumCorrection):
            return MomentumCorrectedOptimizer(optimizer, list(named.values()), compression, self._transport)
        if isinstance(compression, PowerSGD):
            return PowerSGDOptimizer(optimizer, list(named.values()), compression, self._transport)
        if isinstance(compression, HalfGradients):
            return HalfGradientsOptimizer(optimizer, list(named.values()), self._transport)
        if isinstance(compression, StepAhead):
            return StepAheadOptimizer(optimizer, named, compression, ranks, clip)
        scheme = DenseSum() if isinstance(compression, Dense) else compression
        return GradientOptimizer(optimizer, named, scheme, ranks, clip)


def layout_of(named: dict[str, nn.Parameter]) -> Layout:
    return Layout((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named.items())


class ReducingOptimizer:
    """What both below share. reducer: of either kind."""

    reducer: FlatReducer[Layout] | StepAheadReducer[Layout]

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], clip: float) -> None:
        self.optimizer = optimizer
        self._parameters = list(named.values())
        self._clip = clip

    def clip_gradients(self) -> None:
        if self._clip:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def report(self) -> StepReport | None:
        return self.reducer.report

    def set_density(self, density: float | None) -> None:
        self.reducer.set_density(density)


class GradientOptimizer(ReducingOptimizer):
    """Gradients are reduced, and then the optimizer takes its step."""

    reducer: FlatReducer[Layout]

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], scheme: Scheme,
                 ranks: Any, clip: float) -> None:
        super().__init__(optimizer, named, clip)
        self.reducer = FlatReducer(scheme, True, layout_of(named),
                                   lambda layout: NumpyAccumulator(layout.n, layout.dtype), ranks)

    def step(self) -> None:
        gradients = [p.grad.view(-1).numpy() for p in self._parameters if p.grad is not None]
        update = self.reducer.reduce_pieces(zip(self.reducer.layout.offsets[:-1].tolist(), gradients, strict=True))
        assert update is not None
        for own, part in zip(gradients, self.reducer.layout.parts(update), strict=True):
            own.fill(0)
            own[part.indices] = part.values
        self.clip_gradients()
        self.optimizer.step()

    def shared(self) -> AbstractContextManager[None]:
        """The model holds nothing else."""
        return nullcontext()


class StepAheadOptimizer(ReducingOptimizer):
    """The optimizer takes its own steps, and what they did is reduced."""

    reducer: StepAheadReducer[Layout]

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], options: StepAhead,
                 ranks: Any, clip: float) -> None:
        super().__init__(optimizer, named, clip)
        layout = layout_of(named)
        replica = HostReplica(layout, lambda: [p.detach().view(-1).numpy() for p in named.values()])
        self.reducer = StepAheadReducer(options, True, layout, NumpyParameterAccumulator(layout.n, layout.dtype),
                                        replica, ranks, normalizes(type(optimizer)))
        self._gather = OwnGradients(TorchLayout({**named})).elements

    def step(self) -> None:
        self.clip_gradients()
        self.reducer.begin_step()
        self.reducer.observe(self._gather)
        with lengthened(self.optimizer, self.reducer.coefficient, self.reducer.gain):
            self.optimizer.step()
        self.reducer.end_step()

    def shared(self) -> AbstractContextManager[None]:
        return self.reducer.shared()
