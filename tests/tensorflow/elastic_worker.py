"""One worker of an elastic job; see tests.elastic."""

from __future__ import annotations

import sys
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk.tensorflow import OkTopk, StepAhead, shared_parameters, step_report
from horovod_oktopk.tensorflow.registry import each_run_of
from tests.elastic import report, take_steps

keras = tf.keras


def gradient(step: int, rank: int) -> np.ndarray:
    """Return integers, so that sums are exact."""
    return np.random.default_rng((step, rank)).integers(-9, 10, (1, 200))


def residual(model: Any) -> list[float]:
    return each_run_of(model)[0].mode.records()[0]["residual"].tolist()


def main() -> None:
    hvd.init()
    model = keras.Sequential([keras.layers.Input((200,)),
                              keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    options: Any = OkTopk(density=0.05, threshold_interval=3)
    if "step_ahead" in sys.argv:
        options = StepAhead(options)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=options, op=hvd.Sum)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer=optimizer)

    @tf.function
    def descend(inputs: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))

    @hvd.elastic.run
    def train(state: Any) -> str:
        take_steps(hvd, state, lambda step: descend(tf.constant(gradient(step, hvd.rank()), tf.float32)),
                   lambda: residual(model))
        return "trained"

    assert train(hvd_keras.KerasState(model, step=0)) == "trained", "an error was taken for success"
    with shared_parameters(model):
        report(hvd, step_report(model).step, residual(model), model.get_weights()[0].ravel(), gradient)


if __name__ == "__main__":
    main()
