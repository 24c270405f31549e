"""A TensorFlow training whose ranks may go wrong: model.fit under both Keras, or a tape in a tf.function."""
# ruff: noqa: ARG002  (Keras passes callbacks' arguments by name)

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

import horovod_oktopk.tensorflow.keras as hvd_keras
from benchmarks.faults.inject import Injector
from benchmarks.faults.plans import EPOCHS, Plan
from horovod_oktopk.errors import OptionError
from horovod_oktopk.tensorflow import OkTopk, save_state

BATCH = 8


def scheme_of(mode: str) -> Any:
    scheme = OkTopk(density=0.05)
    if mode == "partial":
        return hvd_keras.Partial(scheme)
    return hvd_keras.StepAhead(scheme) if mode == "step-ahead" else scheme


class Program:
    """The model, and what is done with it."""

    def __init__(self, plan: Plan) -> None:
        hvd.init()
        tf.config.threading.set_intra_op_parallelism_threads(1)
        keras.utils.set_random_seed(0)
        self._plan = plan
        layers = keras.layers
        self._model = keras.Sequential([keras.Input((20,)), layers.Dense(40, activation="tanh"), layers.Dense(10)])
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self._failure: str | None = None

    def train(self, injector: Injector, path: Path) -> str | None:
        """Train for all epochs; save the state to `path` after the first one, and return the error if that fails."""
        (self._train_with_tapes if self._plan.program == "tape" else self._fit)(injector, path)
        injector.finish()
        return self._failure

    def _fit(self, injector: Injector, path: Path) -> None:
        self._model.compile(hvd_keras.DistributedOptimizer(self._optimizer, compression=scheme_of(self._plan.mode)),
                            self._loss)
        callbacks = hvd_keras.callbacks
        self._model.fit(*self._data(injector), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback(),
            Steps(injector, lambda: self._save(path, injector))])

    def _train_with_tapes(self, injector: Injector, path: Path) -> None:
        model, optimizer, scheme = self._model, self._optimizer, scheme_of(self._plan.mode)
        hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)  # Keras 3

        @tf.function  # type: ignore[misc]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = self._loss(y, model(x, training=True))
            tape = hvd.DistributedGradientTape(tape, compression=scheme)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        x, y = self._data(injector)
        for epoch in range(EPOCHS):
            for number in range(injector.steps):
                injector.before_step(epoch * injector.steps + number)
                batch = slice(number * BATCH, (number + 1) * BATCH)
                step(tf.constant(x[batch]), tf.constant(y[batch]))
            if epoch == 0:
                self._save(path, injector)

    def _data(self, injector: Injector) -> tuple[Any, Any]:
        """Return this rank's data of one epoch."""
        count = injector.steps * BATCH
        x = np.random.default_rng(1 + hvd.rank()).standard_normal((count, 20), np.float32)
        if injector.nan_step is not None:
            x[injector.nan_step * BATCH:][:BATCH] = np.nan
        return x, np.arange(count) % 10

    def _save(self, path: Path, injector: Injector) -> None:
        try:
            with injector.saving():
                save_state(self._model, path)
        except (OSError, OptionError) as error:
            self._failure = f"{type(error).__name__}: {error}"

    def digest(self) -> tuple[str, bool]:
        """Return the digest of what all ranks share, and True if all of it is finite."""
        if self._plan.mode == "partial":
            hvd_keras.synchronize_replicas(self._model)
        values = np.concatenate([weight.ravel() for weight in self._model.get_weights()])
        return hashlib.sha256(values.tobytes()).hexdigest()[:16], bool(np.isfinite(values).all())


class Steps(keras.callbacks.Callback):
    """Counts steps over all epochs. save: called after the first epoch."""

    def __init__(self, injector: Injector, save: Callable[[], None]) -> None:
        super().__init__()
        self._injector, self._save, self._step = injector, save, -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        self._injector.before_step(self._step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            self._save()
