"""A small Keras model on data that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import PluginError
from horovod_oktopk.tensorflow.private import KERAS_3
from tests.scenarios.common import DENSE, raised_everywhere

keras = tf.keras


def eager(step: Callable[..., Any]) -> Callable[..., Any]:
    return step


EAGER_AND_GRAPH: tuple[Callable[..., Any], ...] = (eager, tf.function)


def refusal(action: Callable[[], object]) -> str:
    """Return the message of the PluginError that is raised on all ranks."""
    return raised_everywhere(hvd, PluginError, action)[0]


def reduced(variables: list[tf.Variable], loss: Callable[[], Any], compression: Any = DENSE,
            **arguments: Any) -> list[Any]:
    """Return a loss's gradients from a distributed tape; their sum over the ranks, if no op is given."""
    with tf.GradientTape() as tape:
        value = loss()
    arguments.setdefault("op", hvd.Sum)
    return hvd.DistributedGradientTape(tape, compression=compression, **arguments).gradient(value, variables)


def make_model(seed: int = 1, **layers: Any) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(24, activation="relu"),
                             keras.layers.Dense(4, **layers)])


def make_data(samples: int = 64) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(100 + hvd.rank()).standard_normal((samples, 20)).astype(np.float32)
    return x, x[:, :4].argmax(1)


def distribute(compression: Any, optimizer: Any = None, **arguments: Any) -> Any:
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    return hvd_keras.DistributedOptimizer(optimizer, compression=compression, **arguments)


def compiled(model: Any, optimizer: Any, **arguments: Any) -> Any:
    arguments.setdefault("jit_compile", False)
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **arguments)
    return model


def fit(model: Any, callbacks: Any = (), epochs: int = 2, **arguments: Any) -> dict[str, list[float]]:
    x, y = make_data()
    history = model.fit(x, y, batch_size=16, shuffle=False, epochs=epochs, verbose=0, callbacks=list(callbacks),
                        **arguments)
    return history.history


def variable_of(values: np.ndarray) -> Any:
    """Return a variable as this Keras makes them."""
    return keras.Variable(values) if KERAS_3 else tf.Variable(values)


def broadcast() -> Any:
    """Return the callback that every script has."""
    return hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)


def weights(model: Any) -> dict[str, np.ndarray]:
    return {f"{index:03}": value for index, value in enumerate(model.get_weights())}
