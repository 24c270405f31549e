"""What cannot work here says so, before anything is lost."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as stock_keras
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import OptionError, PluginError, StepAhead
from horovod_oktopk.tensorflow import OkTopk, load_state, save_state, set_density, step_report
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.registry import Runs
from tests.scenarios.common import DENSE, needs, raised_everywhere
from tests.tensorflow.scenarios.common import compiled, distribute, fit, keras, make_model, variable_of


def check_xla() -> None:
    weight = tf.Variable(tf.ones(3))

    @tf.function(jit_compile=True)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        return hvd.DistributedGradientTape(tape, compression=DENSE).gradient(loss, [weight])[0]

    assert "jit_compile=False" in raised_everywhere(hvd, PluginError, step)[0]


def check_xla_in_fit() -> None:
    def train() -> None:
        fit(compiled(make_model(), distribute(DENSE), jit_compile=True))

    assert "jit_compile=False" in raised_everywhere(hvd, PluginError, train)[0]


def check_optimizers_of_before() -> None:
    plain = [tf.compat.v1.train.GradientDescentOptimizer(1.0)]
    if not KERAS_3:
        plain.append(keras.optimizers.legacy.SGD(1.0))
    for optimizer in plain:
        for compression in (DENSE, StepAhead(DENSE)):
            def make(optimizer: object = optimizer, compression: object = compression) -> None:
                hvd.DistributedOptimizer(optimizer, compression=compression)

            assert "tf.keras.optimizers.SGD" in raised_everywhere(hvd, PluginError, make)[0]


def check_a_graph_of_tensorflow_1() -> None:
    def step() -> None:
        with tf.Graph().as_default():
            weight = tf.Variable(tf.ones(3))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight)
            hvd.DistributedGradientTape(tape, compression=DENSE).gradient(loss, [weight])

    assert "eager mode and in a tf.function" in raised_everywhere(hvd, PluginError, step)[0]


def check_a_lone_allreduce() -> None:
    messages = raised_everywhere(hvd, PluginError, lambda: hvd.allreduce(tf.ones(3), compression=OkTopk()))
    assert "hvd.DistributedGradientTape" in messages[0]


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
        assert "already" in raised_everywhere(hvd, PluginError, lambda made=made: distribute(DENSE, made))[0]
    assert "got 5" in raised_everywhere(hvd, PluginError, lambda: hvd_keras.DistributedOptimizer(5))[0]


def check_float8() -> None:
    needs(KERAS_3, "Keras 3")
    for distributed in (distribute(DENSE), distribute(StepAhead(DENSE)),
                        keras.mixed_precision.LossScaleOptimizer(distribute(DENSE))):
        model = make_model()
        model.quantize("float8")
        compiled(model, distributed)
        assert "mixed_bfloat16" in raised_everywhere(hvd, PluginError, lambda m=model: fit(m))[0]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((2, 20))))
    tape = hvd.DistributedGradientTape(tape, compression=DENSE)
    assert "float8" in raised_everywhere(hvd, PluginError, lambda: tape.gradient(loss, model.trainable_variables))[0]


def plain_like(optimizer: Any) -> Any:
    return keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))


def check_copies_of_optimizers() -> None:
    scaler = keras.mixed_precision.LossScaleOptimizer
    for optimizer in (distribute(DENSE), distribute(DENSE, scaler(keras.optimizers.SGD()))):
        for strategy in (copy.copy, copy.deepcopy, pickle.dumps):
            def make(strategy: Any = strategy, optimizer: Any = optimizer) -> None:
                strategy(optimizer)

            assert "cannot be copied" in raised_everywhere(hvd, PluginError, make)[0]
    cls = type(distribute(DENSE))
    assert "cannot be copied" in raised_everywhere(hvd, PluginError, lambda: cls.from_config({}))[0]


def check_copies_of_models_have_the_plain_optimizer() -> None:
    needs(KERAS_3, "Keras 3")
    optimizer = distribute(DENSE, op=hvd.Sum)
    model = compiled(make_model(), optimizer)
    fit(model)
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    copies = [clone.optimizer, copy.deepcopy(model).optimizer, pickle.loads(pickle.dumps(model)).optimizer,
              plain_like(optimizer)]
    for plain in copies:
        assert type(plain) is keras.optimizers.SGD
    fit(compiled(make_model(), distribute(DENSE, copies[-1])))


def check_reports_density_and_state_of_what_is_not_ours() -> None:
    plain = keras.optimizers.SGD(0.1)
    for action in (lambda: step_report(plain), lambda: set_density(plain, 0.1), lambda: save_state(plain, "x"),
                   lambda: load_state(plain, "x")):
        raised_everywhere(hvd, PluginError, action)


def check_gradients_without_their_variables() -> None:
    other = tf.Variable(tf.ones(3))

    @tf.function
    def step() -> None:
        runs = Runs(DENSE, hvd.Average, hvd.global_process_set, sparse_as_dense=False)
        runs.reduce([tf.ones(3), tf.ones(3)], [other])

    assert "variable of every gradient" in raised_everywhere(hvd, PluginError, step)[0]


def check_what_is_no_compression() -> None:
    variable = tf.Variable(tf.ones(3))
    for wrong in ("oktopk", None, 0.01, hvd.Compression):
        for make in (lambda wrong=wrong: distribute(wrong),
                     lambda wrong=wrong: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=wrong),
                     lambda wrong=wrong: hvd.DistributedGradientTape(tf.GradientTape(), compression=wrong)):
            assert f"got {wrong!r}" in raised_everywhere(hvd, OptionError, make)[0]
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with tape:
        loss = tf.reduce_sum(variable)
    tape.gradient(loss, [variable])  # without the argument it is Horovod's


class Replicas(tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """Of one device, which is all that a test has."""

    def __init__(self) -> None:
        super().__init__(["CPU:0"])


def check_replicas_inside_a_process() -> None:
    for compression in (DENSE, StepAhead(DENSE)):
        with Replicas().scope():
            message = raised_everywhere(hvd, PluginError, lambda c=compression: distribute(c))[0]
            assert "one process for each device" in message
        optimizer = distribute(compression)  # before the scope
        with Replicas().scope():
            model = compiled(make_model(), optimizer)
        assert "one process for each device" in raised_everywhere(hvd, PluginError, lambda m=model: fit(m))[0]


def check_a_name_that_is_no_more_says_what_to_do() -> None:
    for module in ("horovod_oktopk.tensorflow", "horovod_oktopk.tensorflow.keras"):
        message = raised_everywhere(hvd, PluginError, lambda m=module: importlib.import_module(m).discard_update)[0]
        assert f"{module} has no discard_update any more" in message
