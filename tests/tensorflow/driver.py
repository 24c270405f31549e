"""TensorFlow: tapes, and Keras' optimizer (of either Keras)."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import tensorflow as tf

if os.environ.get("TF_USE_LEGACY_KERAS") == "1":  # horovod.keras asks for `keras`, and means this one
    sys.modules["keras"], sys.modules["keras.backend"] = tf.keras, tf.keras.backend

import horovod.tensorflow as hvd

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import PluginError
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.tensorflow import (
    catch_up,
    load_state,
    save_state,
    set_density,
    shared_parameters,
    step_report,
    synchronize_replicas,
)
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.registry import each_run_of
from horovod_oktopk.tensorflow.tensors import TensorFlowTransport
from tests.scenarios import SETS
from tests.scenarios.common import SHAPES
from tests.scenarios.driver import Gradients
from tests.scenarios.state import rewrite


def start(process_sets: list[Any]) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)  # the least: a job must not need more
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # more are added by scenarios
    hvd.init(process_sets=process_sets)


def seed(value: int) -> None:
    tf.keras.utils.set_random_seed(value)


TAPE = {"op", "process_set", "gradient_predivide_factor", "groups", "sparse_as_dense"}
SUPPORTS = {"tape": TAPE, "function": TAPE,
            "keras": {"op", "process_set", "backward_passes_per_step", "sparse_as_dense", "partial"}}


class Kind:
    """See tests.scenarios.driver."""

    route = "Horovod's collectives, as Horovod does not run on MPI"

    hvd = hvd
    sets = SETS
    collectives = TensorFlowTransport

    def __init__(self, name: str) -> None:
        self.name = name
        self.saves_together = True
        self.op_error = PluginError

    @property
    def runs_partial(self) -> bool:
        return bool(hvd.mpi_enabled()) and self.supports("partial")

    def supports(self, argument: str) -> bool:
        return argument in SUPPORTS[self.name]

    def __call__(self, compression: Any, dtype: str = "float32", shapes: Any = None, lr: float = 1.0,
                 momentum: float = 0.0, normalizes: bool = False, **arguments: Any) -> TensorFlowTrainer:
        return TRAINERS[self.name](compression, dtype, shapes or SHAPES, lr, momentum, normalizes, arguments)

    def passes(self, trainer: TensorFlowTrainer, several: list[Gradients]) -> None:
        for grads in several:
            trainer.step(grads)

    def rewrite(self, path: str, residuals: list[np.ndarray]) -> None:
        rewrite(path, residuals)


class Normalizing(tf.keras.optimizers.SGD):  # type: ignore[misc]
    normalizes_gradients = True


class TensorFlowTrainer:
    """See tests.scenarios.driver. Variables are handed over in name order, as PyTorch's integration has them."""

    graph = False

    def __init__(self, compression: Any, dtype: str, shapes: Any, lr: float, momentum: float,
                 normalizes: bool, arguments: dict[str, Any]) -> None:
        self.dtype = tf.as_dtype(dtype)
        self.variables = {name: self.variable(name, shape) for name, shape in sorted(shapes.items())}
        if isinstance(arguments.get("groups"), list):
            arguments["groups"] = [[self.variables[name] for name in group] for group in arguments["groups"]]
        self.initial_lr, self.momentum, self.normalizes = lr, momentum, normalizes
        self.target: Any = list(self.variables.values())
        self.prepare({"compression": compression, **arguments})
        self.run = tf.function(self.take_step, autograph=False) if self.graph else self.take_step

    def variable(self, name: str, shape: tuple[int, ...]) -> Any:
        return tf.Variable(tf.zeros(shape, self.dtype), name=name)

    def prepare(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def loss(self, grads: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(tf.convert_to_tensor(self.variables[name]) * g) for name, g in grads.items()])

    def take_step(self, grads: dict[str, tf.Tensor]) -> None:
        raise NotImplementedError

    def step(self, grads: Gradients) -> None:
        self.run({name: tf.cast(tf.constant(g), self.dtype) for name, g in grads.items()})

    def values(self) -> dict[str, np.ndarray]:
        return self.own_values()

    def own_values(self) -> dict[str, np.ndarray]:
        wide = tf.float64 if self.dtype == tf.float64 else tf.float32
        return {name: tf.cast(tf.convert_to_tensor(v), wide).numpy() for name, v in self.variables.items()}

    def report(self) -> StepReport | None:
        return step_report(self.target)

    def residual(self) -> np.ndarray:
        return each_run_of(self.target)[0].mode.records()[0]["residual"]

    def save(self, path: str) -> None:
        save_state(self.target, path)

    def load(self, path: str) -> None:
        load_state(self.target, path)

    def catch_up(self) -> None:
        catch_up(self.target)

    def synchronize_replicas(self) -> None:
        synchronize_replicas(self.target)

    def lr(self) -> float:
        return float(self.target.learning_rate)

    def set_lr(self, lr: float) -> None:
        self.target.learning_rate = lr

    def set_density(self, density: float) -> None:
        set_density(self.target, density)

    def assign(self, values: Gradients) -> None:
        for name, value in values.items():
            self.variables[name].assign(tf.cast(tf.constant(value), self.dtype))


class TapeTrainer(TensorFlowTrainer):
    def take_step(self, grads: dict[str, tf.Tensor]) -> None:
        variables = list(self.variables.values())
        with tf.GradientTape() as tape:
            loss = self.loss(grads)
        tape = hvd.DistributedGradientTape(tape, **self.arguments)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            if gradient is not None:
                variable.assign_sub(tf.cast(self.initial_lr, self.dtype) * gradient)


class FunctionTrainer(TapeTrainer):
    graph = True


class KerasTrainer(TensorFlowTrainer):
    graph = True

    def variable(self, name: str, shape: tuple[int, ...]) -> Any:
        if not KERAS_3:
            return super().variable(name, shape)
        import keras
        return keras.Variable(np.zeros(shape), dtype=self.dtype.name, name=name)

    def values(self) -> dict[str, np.ndarray]:
        with shared_parameters(self.target):
            return super().values()

    def load(self, path: str) -> None:
        with shared_parameters(self.target):
            super().load(path)

    def assign(self, values: Gradients) -> None:
        with shared_parameters(self.target):
            super().assign(values)
        for momentum in [] if KERAS_3 else self.target.momentums:  # in tf-keras, NaN stays in it, and 0 * NaN is NaN
            momentum.assign(tf.zeros_like(momentum))

    def prepare(self, arguments: dict[str, Any]) -> None:
        optimizer = Normalizing if self.normalizes else tf.keras.optimizers.SGD
        self.target = hvd_keras.DistributedOptimizer(optimizer(self.initial_lr, self.momentum), **arguments)
        self.target.build(list(self.variables.values()))

    def take_step(self, grads: dict[str, tf.Tensor]) -> None:
        variables = list(self.variables.values())
        with tf.GradientTape() as tape:
            loss = self.loss(grads)
        self.target.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


TRAINERS = {"tape": TapeTrainer, "function": FunctionTrainer, "keras": KerasTrainer}
