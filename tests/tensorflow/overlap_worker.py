"""One rank of a job whose backward pass goes on only when the first of two buckets is reduced, or after 20 s."""

from __future__ import annotations

import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk.tensorflow import OkTopk
from horovod_oktopk.tensorflow.registry import reducers_of

tf.config.threading.set_inter_op_parallelism_threads(4)
VARIABLES = [tf.Variable(tf.ones(50)) for _ in range(2)]
reduced: list[int] = []
"""Groups that were reduced in each step when the backward pass went on."""


def wait(gradient: np.ndarray) -> np.ndarray:
    deadline = time.monotonic() + 20
    while True:
        now = len(reducers_of(VARIABLES)[0].flat._results)
        if now == 1 or time.monotonic() > deadline:
            reduced.append(now)
            return gradient
        time.sleep(0.001)


@tf.custom_gradient
def hold_backward(inputs: tf.Tensor) -> tf.Tensor:
    def backward(gradient: tf.Tensor) -> tf.Tensor:
        held = tf.numpy_function(wait, [gradient], tf.float32, stateful=False)  # or TensorFlow would run it first
        held.set_shape(gradient.shape)
        return held

    return tf.identity(inputs), backward


def main() -> None:
    hvd.init()
    options = OkTopk(density=0.5, bucket_bytes=1)

    @tf.function
    def take_step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hold_backward(2 * VARIABLES[0]) * VARIABLES[1])
        tape = hvd.DistributedGradientTape(tape, compression=options)
        for variable, gradient in zip(VARIABLES, tape.gradient(loss, VARIABLES), strict=True):
            variable.assign_sub(gradient)

    for _ in range(3):
        take_step()
    print(f"buckets reduced in the backward pass: {reduced}", flush=True)


if __name__ == "__main__":
    main()
