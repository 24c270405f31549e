"""One rank of a job in which the last rank is killed at step 3."""

from __future__ import annotations

import os
import signal

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.tensorflow import OkTopk
from tests.say import say


def main() -> None:
    hvd.init()
    weight = tf.Variable(tf.zeros((30, 30)))
    options = OkTopk(density=0.1)

    @tf.function
    def take_step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.random.normal((30, 30)))
        tape = hvd.DistributedGradientTape(tape, compression=options)
        weight.assign_sub(tape.gradient(loss, [weight])[0])

    for step in range(1_000_000):
        if step == 3:
            say(f"rank {hvd.rank()} has reached step 3")
        if step == 3 and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        take_step()


if __name__ == "__main__":
    main()
