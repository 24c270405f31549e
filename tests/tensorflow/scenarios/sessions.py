"""Graphs of TensorFlow 1, whose sessions run operations in any order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk.tensorflow import OkTopk, load_state, save_state, step_report
from tests.scenarios.common import DENSE, assert_disagreement, everywhere, is_last, shared_folder

v1 = tf.compat.v1
STEPS = 3


def session(threads: int) -> Any:
    return v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=threads, use_per_session_threads=True))


def late(seconds: float) -> tf.Tensor:
    """1, after a while."""
    def wait() -> np.float32:
        time.sleep(seconds)
        return np.float32(1)
    return tf.reshape(tf.numpy_function(wait, [], tf.float32), [])


def two_optimizers(compression: Any, **arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Variables of two lengths, optimizers and training operations. Which of the two losses comes first differs from
    rank to rank."""
    variables, optimizers, trains = [], [], []
    for index in range(2):
        weight = v1.get_variable(f"weight{index}", initializer=tf.zeros(3 + index))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), name=f"optimizer{index}",
                                             op=hvd.Sum, compression=compression, **arguments)
        factor = late(0.02 * ((hvd.rank() + index) % 2)) * (hvd.rank() + 1.0) * (index + 1.0)
        trains.append(optimizer.minimize(factor * tf.reduce_sum(weight), var_list=[weight]))
        variables.append(weight)
        optimizers.append(optimizer)
    return variables, optimizers, trains


def expected(steps: int) -> list[list[float]]:
    ranks = sum(range(1, hvd.size() + 1))
    return [[-steps * ranks * (index + 1.0)] * (3 + index) for index in range(2)]


def check_a_session_of_tensorflow_1() -> None:
    with tf.Graph().as_default(), v1.Session() as sess:
        weight = v1.get_variable("weight", initializer=tf.zeros(4))
        scale = v1.placeholder(tf.float32, [])
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum,
                                             compression=OkTopk(k=2))
        train = optimizer.minimize(scale * tf.reduce_sum(weight * [1.0, 2.0, 3.0, 4.0]), var_list=[weight])
        sess.run(v1.global_variables_initializer())
        sess.run(train, {scale: hvd.rank() + 1.0})
        total = sum(range(1, hvd.size() + 1))
        assert sess.run(weight).tolist() == [0.0, 0.0, -3.0 * total, -4.0 * total]
        assert step_report(optimizer).step == 1


def check_two_optimizers_in_one_run() -> None:
    """However many threads the session has, and over whatever network."""
    for transport in ("auto", "horovod"):
        for threads in (1, 4):
            with tf.Graph().as_default(), session(threads) as sess:
                options = OkTopk(density=1.0, threshold_interval=1, transport=transport)
                variables, optimizers, trains = two_optimizers(options)
                sess.run(v1.global_variables_initializer())
                for _ in range(STEPS):
                    sess.run(trains if hvd.rank() % 2 else trains[::-1])
                assert [v.tolist() for v in sess.run(variables)] == expected(STEPS)
                assert [step_report(optimizer).step for optimizer in optimizers] == [STEPS] * 2


def check_one_optimizer_of_two_can_be_run_alone() -> None:
    with tf.Graph().as_default(), session(1) as sess:
        variables, optimizers, trains = two_optimizers(DENSE)
        sess.run(v1.global_variables_initializer())
        sess.run(trains[1])
        assert [v.tolist() for v in sess.run(variables)] == [[0.0] * 3, expected(1)[1]]
        sess.run(trains)
        assert [step_report(optimizer).step for optimizer in optimizers] == [1, 2]


def check_two_optimizers_whose_gradients_are_in_buckets() -> None:
    with tf.Graph().as_default(), session(1) as sess:
        trains, variables = [], []
        for index in range(2):
            weights = [v1.get_variable(f"weight{index}{part}", initializer=tf.zeros(3)) for part in "ab"]
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum,
                                                 compression=OkTopk(density=1.0, bucket_bytes=4))
            factor = late(0.02 * ((hvd.rank() + index) % 2))
            trains.append(optimizer.minimize(factor * tf.add_n(list(map(tf.reduce_sum, weights))), var_list=weights))
            variables += weights
        sess.run(v1.global_variables_initializer())
        for _ in range(STEPS):
            sess.run(trains)
        assert [v.tolist() for v in sess.run(variables)] == [[-float(STEPS * hvd.size())] * 3] * 4


def check_two_optimizers_that_aggregate_locally() -> None:
    with tf.Graph().as_default(), session(1) as sess:
        variables, _, trains = two_optimizers(DENSE, backward_passes_per_step=2)
        sess.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for _ in range(4):
            sess.run(trains)
        assert [v.tolist() for v in sess.run(variables)] == expected(4)


def check_two_steps_of_one_optimizer_in_one_run() -> None:
    with tf.Graph().as_default(), session(1) as sess:
        weight = v1.get_variable("weight", initializer=tf.zeros(4))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), compression=DENSE, op=hvd.Sum)
        trains = [optimizer.minimize(late(0.02 * ((hvd.rank() + index) % 2)) * tf.reduce_sum(weight),
                                     var_list=[weight]) for index in range(2)]
        sess.run(v1.global_variables_initializer())
        sess.run(trains)
        assert step_report(optimizer).step == 2
        assert sess.run(weight).tolist() == [-2.0 * hvd.size()] * 4


def check_a_difference_between_ranks_is_found_in_both() -> None:
    with tf.Graph().as_default(), session(1) as sess:
        _, _, trains = two_optimizers(OkTopk(density=0.5 if is_last(hvd) else 0.25))
        sess.run(v1.global_variables_initializer())
        assert_disagreement(hvd, lambda: sess.run(trains), "density: 0.25", "density: 0.5")


def check_the_states_of_two_optimizers_are_loaded_in_one_run() -> None:
    def train(steps: int, prepare: Callable[[list[Any]], None]) -> list[list[float]]:
        with tf.Graph().as_default(), session(1) as sess:
            variables, optimizers, trains = two_optimizers(OkTopk(k=1))
            sess.run(v1.global_variables_initializer())
            prepare(optimizers)
            for _ in range(steps):
                sess.run(trains)
            for index, optimizer in enumerate(optimizers):
                save_state(optimizer, folder / f"{index}")
            return [v.tolist() for v in sess.run(variables)]

    def load(optimizers: list[Any]) -> None:
        for index, optimizer in enumerate(optimizers):
            load_state(optimizer, folder / f"{index}")

    with shared_folder(hvd) as folder:
        whole = train(3, lambda _: None)
        first = train(1, lambda _: None)
        rest = train(2, load)
        everywhere(hvd, "done")
    assert [np.add(*parts).tolist() for parts in zip(first, rest, strict=True)] == whole
