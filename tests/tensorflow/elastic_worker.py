"""One worker of an elastic job: at step 5 the worker of one host kills itself; the rest go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk.tensorflow import OkTopk, StepAhead, shared_parameters, step_report
from horovod_oktopk.tensorflow.registry import each_run_of

STEPS = 12
VICTIM = "127.0.0.1"
"""The host with one worker: Horovod lets no host of a dead worker take part again."""
keras = tf.keras


def gradient(step: int, rank: int) -> np.ndarray:
    """Integers, so that sums are exact."""
    return np.random.default_rng((step, rank)).integers(-9, 10, (1, 200))


def residual(model: Any) -> list[float]:
    return each_run_of(model)[0].mode.record()["residual"].tolist()


def main() -> None:
    folder = Path(sys.argv[1])
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
    def take_step(inputs: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))

    state = hvd_keras.KerasState(model, step=0)

    @hvd.elastic.run
    def train(state: Any) -> str:
        while state.step < STEPS:
            if state.step == 5 and os.environ["HOROVOD_HOSTNAME"] == VICTIM and not (folder / "killed").exists():
                (folder / "killed").write_text(json.dumps(residual(model)))
                os.kill(os.getpid(), signal.SIGKILL)
            if (folder / "killed").exists() and hvd.size() < 3:  # wait for the newcomer
                time.sleep(0.1)
                state.commit()
                continue
            take_step(tf.constant(gradient(state.step, hvd.rank()), tf.float32))
            state.step += 1
            state.commit()
        return "trained"

    assert train(state) == "trained", "an error was taken for success"
    computed = sum(gradient(step, rank)[0] for step in range(STEPS) for rank in range(3))
    with shared_parameters(model):
        mine = {"size": hvd.size(), "step": step_report(model).step, "residual": residual(model),
                "weight": model.get_weights()[0].ravel().tolist(), "computed": computed.tolist()}
    everyone = hvd.allgather_object(mine)
    if hvd.rank() == 0:
        (folder / "outcome.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
