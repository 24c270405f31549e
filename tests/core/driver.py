"""The core alone: ranks are threads, parameters are NumPy arrays, and SGD is plain.

No other file of tests/core knows the classes that reduce a model's gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from horovod_oktopk import OkTopkError, PluginError
from horovod_oktopk.kernels import KERNELS
from horovod_oktopk.modes.make import kind_of, make_mode
from horovod_oktopk.modes.partial.mode import PartialMode, remove
from horovod_oktopk.schemes.options import Compression
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.selection.replica import Replica
from horovod_oktopk.state import gather
from horovod_oktopk.transport.connect import introduce
from horovod_oktopk.transport.horovod import check_arguments
from horovod_oktopk.vectors.layout import Layout
from tests.core.world import CoreRanks, Hvd, ProcessSet
from tests.scenarios.common import SHAPES
from tests.scenarios.driver import Gradients
from tests.scenarios.state import rewrite
from tests.support.flat_gradients import FlatGradients


class Kind:
    """See tests.scenarios.driver."""

    name = "core"
    route = "threads, as there is none (start the job with `horovodrun --mpi`)"
    saves_together = runs_partial = True
    op_error = PluginError
    make_ranks: Any = CoreRanks
    rewrite = staticmethod(rewrite)

    def __init__(self, hvd: Hvd) -> None:
        self.hvd, last = hvd, hvd.size() - 1
        self.everyone = ProcessSet(hvd, list(range(last + 1)))
        self.sets = [ProcessSet(hvd, list(range(last))), ProcessSet(hvd, [last])] if last else []
        self._trainers: list[CoreTrainer] = []

    def supports(self, argument: str) -> bool:
        return argument in ("op", "process_set", "partial")

    def __call__(self, compression: Any, dtype: str = "float32", shapes: Any = None, lr: float = 1.0,
                 momentum: float = 0.0, op: str = Hvd.Average, process_set: ProcessSet | None = None,
                 normalizes: bool = False) -> CoreTrainer:
        options = compression() if isinstance(compression, type) else compression
        process_set = process_set or self.everyone
        if not isinstance(options, Compression) or not process_set.included():
            options = None
        else:
            check_arguments(self.hvd, op)
        # The ranks make trainers in the same order, so each has a channel of its own.
        ranks = self.make_ranks(self.hvd, process_set, len(self._trainers) + 1)
        trainer = CoreTrainer(options, op == self.hvd.Average, ranks, dtype, shapes or SHAPES, lr, momentum,
                              normalizes)
        self._trainers.append(trainer)
        return trainer

    def end(self) -> None:
        """End the trainers after the scenario. Collective."""
        for trainer in self._trainers:
            trainer.end()


class CoreTrainer:
    """See tests.scenarios.driver. Without options gradients are added up densely."""

    def __init__(self, options: Any, average: bool, ranks: CoreRanks, dtype: str, shapes: Any, lr: float,
                 momentum: float, normalizes: bool) -> None:
        self.ranks, self.average, self.dtype, self.momentum = ranks, average, dtype, momentum
        self.layout = Layout((name, shape, dtype) for name, shape in sorted(shapes.items()))
        self.vector, self.velocity = np.zeros((2, self.layout.n), self.layout.dtype)
        self.parts = np.split(self.vector, self.layout.offsets[1:-1])
        self.parameters = {name: part.reshape(shape) for (name, shape, _), part
                           in zip(self.layout.entries, self.parts, strict=True)}
        self.set_lr(lr)
        self.is_started, self.host = False, 1
        self.mode: Any = None if options is None else self.make(options, normalizes)

    def make(self, options: Any, normalizes: bool) -> Any:
        if kind_of(options).reads_memory:
            hosts = options.scheme.hierarchical
            self.host = self.ranks.process_set.size() if hosts is True else int(hosts or 1)
        return make_mode(options, self.average, self.layout, self.ranks, self.gradient_memory, self.parameter_memory,
                         normalizes=normalizes, settings=["lr"])

    def gradient_memory(self) -> NumpyAccumulator:
        return NumpyAccumulator(self.layout.n, self.layout.dtype)

    def parameter_memory(self) -> tuple[NumpyParameterAccumulator, Replica]:
        accumulator = NumpyParameterAccumulator(self.layout.n, self.layout.dtype)
        return accumulator, Replica(self.layout, lambda: self.parts)

    def step(self, grads: Gradients) -> None:
        if self.mode is None:
            total = self.ranks.dense_sum(self.flat(grads))
            self.descend(total / self.ranks.process_set.size() if self.average else total, self.lr())
            return
        gradients = CoreGradients(self, self.reduced_on_host(self.flat(grads)))
        self.mode.reduce(gradients)
        self.take_steps(self.mode.begin(gradients, [self.lr()]), gradients)
        self.mode.end()
        self.is_started = True

    def take_steps(self, count: int, gradients: CoreGradients) -> None:
        for _ in range(count):
            settings = self.mode.prepare(gradients)
            self.descend(gradients.values, *(settings or [self.lr() * self.mode.coefficient * self.mode.gain]))

    def reduced_on_host(self, gradient: np.ndarray) -> np.ndarray:
        """Return the host's mean or sum, as an integration does if a host is one worker in StepAhead."""
        length, rank = self.host, self.ranks.process_set.rank()
        if length == 1:
            return gradient
        if not self.is_started:  # finds hosts, and ranks that have chosen others
            introduce(self.ranks, "auto", self.mode.options.scheme.hierarchical)
        host = range(rank - rank % length, rank - rank % length + length)
        together = self.ranks.hvd.transport(host, f"host {self.ranks.channel}").allreduce(gradient)
        return together / length if self.average else together

    def flat(self, grads: Gradients) -> np.ndarray:
        everything = [grads.get(name, np.zeros_like(p)).ravel() for name, p in self.parameters.items()]
        return self.rounded(np.concatenate(everything).astype(self.layout.dtype))

    def descend(self, gradient: np.ndarray, lr: float) -> None:
        self.velocity = gradient + self.momentum * self.velocity if self.momentum else gradient
        self.vector[:] = self.rounded(self.vector - self.layout.dtype.type(lr) * self.velocity)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Round to the parameters' dtype; NumPy has no bfloat16."""
        if self.dtype == "bfloat16":
            return KERNELS.from_half(KERNELS.to_half(values), np.float32)
        return values.astype(self.dtype).astype(self.layout.dtype)

    def shared(self) -> Any:
        return nullcontext() if self.mode is None else self.mode.shared()

    def values(self) -> dict[str, np.ndarray]:
        with self.shared():
            return self.own_values()

    def own_values(self) -> dict[str, np.ndarray]:
        return {name: p.copy() for name, p in self.parameters.items()}

    def assign(self, values: Gradients) -> None:
        with self.shared():
            for name, value in values.items():
                self.parameters[name][...] = value

    def report(self) -> StepReport | None:
        return self.mode and self.mode.report

    def residual(self) -> np.ndarray:
        return self.mode.records()[0]["residual"]

    def save(self, path: str) -> None:
        if self.mode is not None:
            gather.save([self.mode], path)

    def load(self, path: str) -> None:
        with self.shared():
            gather.load(self.mode, 0, path)
        self.mode.resume()

    def lr(self) -> float:
        return self._lr

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    def set_density(self, density: float) -> None:
        if self.mode is not None:
            self.mode.set_density(density)

    def catch_up(self) -> None:
        if self.mode is not None:
            self.mode.catch_up()

    def synchronize_replicas(self, for_good: bool = False) -> None:
        if self.mode is None:
            return
        gradients = CoreGradients(self, self.vector)
        for count in self.mode.synchronize(for_good):
            self.take_steps(count, gradients)
        if self.mode.drifts:
            mean = self.ranks.dense_sum(self.vector) / self.ranks.process_set.size()
            self.vector[:] = self.rounded(mean)
        self.is_started = True

    def end(self) -> None:
        if self.mode is None or (isinstance(self.mode, PartialMode) and not self.is_started):
            return
        try:
            self.synchronize_replicas(for_good=True)
            self.mode.close()
        except OkTopkError:  # rounds have failed before, on all ranks
            remove(self.mode)


class CoreGradients(FlatGradients):
    """An update is written over the values; where it has no number, there is none here, as in the frameworks."""

    clearable = True

    def __init__(self, trainer: CoreTrainer, values: np.ndarray) -> None:
        offsets = trainer.layout.offsets
        super().__init__(values, list(zip(offsets[:-1].tolist(), np.split(values, offsets[1:-1]), strict=True)))
        self.trainer = trainer

    def write(self, update: Any, cleared: bool) -> None:
        super().write(update, cleared)
        nothing = np.full(self.trainer.layout.n, np.nan, self.trainer.layout.dtype)
        written = self.dense_update()
        self.values = self.trainer.rounded(nothing if written is None else written)


