"""Refusals of what cannot work here, before anything is lost."""

from __future__ import annotations

import copy
import functools
import pickle

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as stock_keras
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import OptionError, StepAhead
from horovod_oktopk.tensorflow import OkTopk, load_state, save_state, set_density, step_report
from horovod_oktopk.tensorflow.private import KERAS_3
from tests.scenarios.common import DENSE, needs, raised_everywhere
from tests.tensorflow.scenarios.common import (
    compiled,
    distribute,
    fit,
    keras,
    make_model,
    reduced,
    refusal,
    variable_of,
)


def check_xla() -> None:
    weight = tf.Variable(tf.ones(3))
    step = tf.function(functools.partial(reduced, [weight], lambda: tf.reduce_sum(weight)), jit_compile=True)
    assert "jit_compile=False" in refusal(step)
    model = compiled(make_model(), distribute(DENSE), jit_compile=True)
    assert "jit_compile=False" in refusal(lambda: fit(model))


def check_optimizers_of_before() -> None:
    plain = [tf.compat.v1.train.GradientDescentOptimizer(1.0)]
    if not KERAS_3:
        plain.append(keras.optimizers.legacy.SGD(1.0))
    for optimizer in plain:
        for compression in (DENSE, StepAhead(DENSE)):
            make = functools.partial(hvd.DistributedOptimizer, optimizer, compression=compression)
            assert "tf.keras.optimizers.SGD" in refusal(make)


def check_a_graph_of_tensorflow_1() -> None:
    def step() -> None:
        with tf.Graph().as_default():
            weight = tf.Variable(tf.ones(3))
            reduced([weight], lambda: tf.reduce_sum(weight))

    assert "eager mode and in a tf.function" in refusal(step)


def check_a_lone_allreduce() -> None:
    assert "hvd.DistributedGradientTape" in refusal(lambda: hvd.allreduce(tf.ones(3), compression=OkTopk()))


def check_every_factory_of_horovod_makes_a_keras_optimizer() -> None:
    import horovod.keras
    for make in (stock_keras.DistributedOptimizer, hvd.DistributedOptimizer, horovod.keras.DistributedOptimizer):
        model = compiled(make_model(), make(keras.optimizers.SGD(0.1), compression=OkTopk(density=0.1)))
        fit(model)
        assert step_report(model).step == 8


def check_op_reaches_a_keras_optimizer() -> None:
    """Horovod's own hvd.DistributedOptimizer drops it."""
    weight = variable_of(np.zeros(3, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=DENSE, op=hvd.Sum)
    optimizer.apply_gradients([(tf.ones(3), weight)])
    assert np.array(tf.convert_to_tensor(weight)).tolist() == [-float(hvd.size())] * 3


def check_fit_without_a_trainable_variable() -> None:
    """Keras 3 warns of it."""
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(4, trainable=False)])
    fit(compiled(model, distribute(DENSE)))


def check_distributing_twice_or_something_else() -> None:
    optimizer = distribute(DENSE)
    stock = stock_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for made in (optimizer, stock):
        assert "already" in refusal(functools.partial(distribute, DENSE, made))
    assert "got 5" in refusal(lambda: hvd_keras.DistributedOptimizer(5))


def check_float8() -> None:
    needs(KERAS_3, "Keras 3")
    for distributed in (distribute(DENSE), distribute(StepAhead(DENSE)),
                        keras.mixed_precision.LossScaleOptimizer(distribute(DENSE))):
        model = make_model()
        model.quantize("float8")
        compiled(model, distributed)
        assert "mixed_bfloat16" in refusal(functools.partial(fit, model))
    assert "float8" in refusal(
        lambda: reduced(model.trainable_variables, lambda: tf.reduce_sum(model(tf.ones((2, 20))))))


def check_copies_of_optimizers() -> None:
    scaler = keras.mixed_precision.LossScaleOptimizer
    for optimizer in (distribute(DENSE), distribute(DENSE, scaler(keras.optimizers.SGD()))):
        for strategy in (copy.copy, copy.deepcopy, pickle.dumps):
            assert "cannot be copied" in refusal(functools.partial(strategy, optimizer))
    cls = type(distribute(DENSE))
    assert "cannot be copied" in refusal(lambda: cls.from_config({}))


def check_copies_of_models_have_the_plain_optimizer() -> None:
    needs(KERAS_3, "Keras 3")
    optimizer = distribute(DENSE, op=hvd.Sum)
    model = compiled(make_model(), optimizer)
    fit(model)
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    copies = [clone.optimizer, copy.deepcopy(model).optimizer, pickle.loads(pickle.dumps(model)).optimizer,
              keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))]
    for plain in copies:
        assert type(plain) is keras.optimizers.SGD
    fit(compiled(make_model(), distribute(DENSE, copies[-1])))


def check_reports_density_and_state_of_what_is_not_ours() -> None:
    plain = keras.optimizers.SGD(0.1)
    for action in (lambda: step_report(plain), lambda: set_density(plain, 0.1), lambda: save_state(plain, "x"),
                   lambda: load_state(plain, "x")):
        refusal(action)


def check_gradients_without_their_variables() -> None:
    needs(KERAS_3, "Keras 3, as tf-keras takes pairs")
    for compression in (DENSE, StepAhead(DENSE), hvd.Compression.none):
        for count in (1, 3):
            optimizer, variables = distribute(compression), [tf.Variable(tf.ones(3)) for _ in range(2)]
            step = tf.function(functools.partial(optimizer.apply, [tf.ones(3)] * count, variables))
            assert f"got {count} gradients and 2 variables" in refusal(step), compression


def check_what_is_no_compression() -> None:
    for wrong in ("oktopk", None, 0.01, hvd.Compression):
        for make in (lambda wrong=wrong: distribute(wrong),
                     lambda wrong=wrong: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=wrong),
                     lambda wrong=wrong: hvd.DistributedGradientTape(tf.GradientTape(), compression=wrong)):
            assert f"got {wrong!r}" in raised_everywhere(hvd, OptionError, make)[0]
    variable = tf.Variable(tf.ones(3))
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with tape:
        loss = tf.reduce_sum(variable)
    tape.gradient(loss, [variable])  # without the argument it is Horovod's


class Replicas(tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """Replicas on one device, which is all that a test has."""

    def __init__(self) -> None:
        super().__init__(["CPU:0"])


def check_replicas_inside_a_process() -> None:
    for compression in (DENSE, StepAhead(DENSE)):
        with Replicas().scope():
            assert "one process for each device" in refusal(functools.partial(distribute, compression))
        optimizer = distribute(compression)  # before the scope
        with Replicas().scope():
            model = compiled(make_model(), optimizer)
        assert "one process for each device" in refusal(functools.partial(fit, model))
