"""One rank of a job in which the last rank ends after five steps, in the way that the arguments say.

even: all ranks take equally many steps. again: these too; they shut Horovod down, look at what they share, and start
Horovod anew. frozen at the end: these too, and
the last rank stands still then. interrupted: Ctrl-C in the job's terminal. open: StepAhead, and the program ends in
shared_parameters. Any other rank prints what it was told, and ends well.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.say import say

FEW, MANY = 5, 12


def torch_step(kind: str) -> tuple[Any, Callable[[], None]]:
    import horovod.torch as hvd
    import torch

    from horovod_oktopk.torch import OkTopk, Partial, StepAhead, shared_parameters
    torch.optim.SGD([torch.zeros(1)], lr=1)  # what it imports takes long: the ranks are to begin together
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 20)
    options = OkTopk(density=0.1, hierarchical=2 if kind == "hosts" else False)
    wrap = {"step_ahead": StepAhead, "open": StepAhead, "partial": Partial}.get(kind)
    compression = wrap(options) if wrap else options
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression,
                                         named_parameters=model.named_parameters())
    steps = itertools.count(1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()
        if kind == "open" and next(steps) == MANY:  # never left, and kept alive by a cycle until the very end
            model.itself, model.shared = [model], shared_parameters(optimizer)
            model.shared.__enter__()

    def look() -> None:
        with shared_parameters(optimizer):
            assert all(p.isfinite().all() for p in model.parameters())

    step.look = look
    return hvd, step


def tensorflow_step() -> tuple[Any, Callable[[], None]]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_oktopk.tensorflow import OkTopk
    hvd.init()
    weight, options = tf.Variable(tf.zeros((20, 20))), OkTopk(density=0.1)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        tape = hvd.DistributedGradientTape(tape, compression=options)
        weight.assign_sub(tape.gradient(loss, [weight])[0])

    return hvd, step


def keras_step() -> tuple[Any, Callable[[], None]]:
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    from horovod_oktopk.tensorflow.keras import DistributedOptimizer, OkTopk
    hvd.init()
    model = tf.keras.Sequential([tf.keras.layers.Input((20,)), tf.keras.layers.Dense(20)])
    optimizer = DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=OkTopk(density=0.1))
    model.compile(optimizer=optimizer, loss="mse")
    return hvd, lambda: model.train_on_batch(tf.ones((4, 20)), tf.zeros((4, 20)))


def end(how: str, hvd: Any, step: Callable[[], None]) -> None:
    """End the last rank after its steps."""
    if how == "raising":
        raise ValueError("the file is gone")
    if how == "exiting with 3":
        sys.exit(3)
    if how in ("terminated", "interrupted"):
        say(f"the signal was sent at {time.time()}.")
    if how == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "interrupted":
        os.killpg(int(os.environ["LAUNCHER"]), signal.SIGINT)
        time.sleep(100)
    if how in ("frozen", "frozen at the end"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "shutdown":
        hvd.shutdown()
        time.sleep(3)
    if how == "stalling":
        time.sleep(float(os.environ["STALL"]))
        for _ in range(MANY - FEW):
            step()


def main() -> None:
    framework, how = sys.argv[1:]
    make = {"tensorflow": tensorflow_step, "keras": keras_step}.get(framework, lambda: torch_step(framework))
    hvd, step = make()
    rank, is_last = hvd.rank(), hvd.rank() == hvd.size() - 1
    try:
        for _ in range(FEW if is_last and how not in ("even", "again", "frozen at the end") else MANY):
            step()
        if how == "again":
            hvd.shutdown()
            step.look()
            hvd, step = make()
            step()
        if is_last:
            end(how, hvd, step)
    except ValueError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())  # in TensorFlow a graph's names stand before it
        say(f"rank {rank} was told: {text[max(text.find('rank '), 0):][:150]}")
        return
    say(f"rank {rank} has come to its end")


if __name__ == "__main__":
    main()
