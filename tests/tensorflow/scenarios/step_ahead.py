"""`compression=StepAhead(...)` under both Keras: the optimizer takes its own steps, and what they did is reduced."""

from __future__ import annotations

import contextlib
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_oktopk import Dense, OkTopk, StepAhead
from horovod_oktopk.tensorflow import shared_parameters, step_report
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.variables import VariableReplica, tensor_of
from horovod_oktopk.vectors.layout import Layout
from horovod_oktopk.vectors.sparse import RunVector, SparseVector
from tests.scenarios.common import assert_equal_everywhere, everywhere, is_last, needs_ranks
from tests.tensorflow.scenarios.common import compiled, distribute, fit, keras, make_data, make_model, variable_of
from tests.tensorflow.scenarios.own_optimizers import Gan

OPTIONS = StepAhead(OkTopk(density=0.05))
Scaler = keras.mixed_precision.LossScaleOptimizer


def model_with(compression: Any = OPTIONS, optimizer: Any = None, seed: int = 1, **arguments: Any) -> Any:
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    return compiled(make_model(seed), distribute(compression, optimizer), **arguments)


def take_steps(model: Any, steps: range, spoilt: bool = False) -> None:
    """Train on one batch in each step, without `fit`. spoilt: with a gradient that is not finite."""
    x, y = make_data()
    for step in steps:
        part = slice(8 * (step % 8), 8 * (step % 8) + 8)
        model.train_on_batch(x[part] * (np.float32("inf") if spoilt else 1), y[part])


def own(model: Any) -> np.ndarray:
    """Return what the variables hold."""
    return np.concatenate([np.array(tf.convert_to_tensor(v)).ravel() for v in model.trainable_variables])


def shared(model: Any) -> np.ndarray:
    with shared_parameters(model):
        return own(model)


def assert_shared_is_equal(*models: Any) -> None:
    for model in models:
        assert_equal_everywhere(hvd, {"w": shared(model)})
        assert np.isfinite(shared(model)).all()


def check_graphs_and_eager_steps_have_the_same_bits() -> None:
    results = []
    for arguments in ({}, {"run_eagerly": True}, {"steps_per_execution": 2}):
        model = model_with(**arguments)
        fit(model)
        results.append(own(model))
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)  # eager gradients round in another way
    assert np.array_equal(results[2], results[0])


def check_any_optimizer_takes_the_step() -> None:
    kinds = keras.optimizers
    schedule = kinds.schedules.ExponentialDecay(0.1, 2, 0.5)
    for optimizer in (kinds.AdamW(0.01, weight_decay=0.1, clipnorm=0.1), kinds.Adafactor(0.01), kinds.SGD(schedule)):
        model = model_with(optimizer=optimizer)
        before = own(model)
        take_steps(model, range(3))
        assert not np.array_equal(before, shared(model))
        assert_shared_is_equal(model)


def check_the_learning_rate_is_the_users_and_a_step_takes_a_part_of_it() -> None:
    """With plain SGD, λ = 1/2, and k = n: a local step is half a step. As soon as it is under way, p is where a whole
    one leads, and w follows."""
    for local_steps, part in ((2, 0.5), (1, 1.0)):
        options = StepAhead(OkTopk(density=1.0, value_dtype=None), ahead=0.5, local_steps=local_steps)
        model = model_with(options, keras.optimizers.SGD(1.0))
        model.optimizer.learning_rate = 0.25
        gradients, before = gradients_of(model), own(model)
        take_steps(model, range(1))
        assert float(np.asarray(model.optimizer.learning_rate)) == 0.25
        np.testing.assert_allclose(own(model), before - 0.25 * part * gradients, atol=1e-6)
    mean = np.mean(everywhere(hvd, gradients), axis=0)
    np.testing.assert_allclose(shared(model), before - 0.25 * mean, atol=1e-6)


def gradients_of(model: Any) -> np.ndarray:
    """Return the gradients of the first batch."""
    x, y = make_data()
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y[:8], model(x[:8]))
    return np.concatenate([np.ravel(g) for g in tape.gradient(loss, model.trainable_variables)])


def check_a_learning_rate_schedule_is_multiplied_once() -> None:
    """tf-keras keeps a schedule's present rate in a variable."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    results = []
    for optimizer in (keras.optimizers.SGD(rate), keras.optimizers.SGD(0.5)):
        model = model_with(StepAhead(Dense(), ahead=0.5), optimizer)
        for step in range(4):
            if optimizer.get_config()["learning_rate"] == 0.5 and step == 2:
                model.optimizer.learning_rate = 0.25
            take_steps(model, range(step, step + 1))
        results.append(own(model))
    assert np.array_equal(*results)


class Fails(keras.optimizers.SGD):  # type: ignore[misc]
    """Fails at one step."""

    steps = 0

    def update_step(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            raise KeyError("a mistake of the program's")
        super().update_step(*args, **kwargs)


def check_an_error_in_the_optimizers_step_leaves_the_learning_rate_and_the_next_step_is_taken() -> None:
    variable = variable_of(np.ones(3, np.float32))
    optimizer = distribute(StepAhead(Dense(), ahead=0.5, overlap=False), Fails(0.5))
    optimizer.build([variable])
    for step in range(5):
        with pytest.raises(KeyError) if step == 2 else contextlib.nullcontext():
            optimizer.apply_gradients([(tf.ones(3), variable)])
        assert float(np.asarray(optimizer.learning_rate)) == 0.5
    with shared_parameters(optimizer):
        np.testing.assert_allclose(np.array(tf.convert_to_tensor(variable)), 1 - 4 * 0.5, rtol=1e-6)


def check_every_rank_may_have_a_loss_scale_of_its_own() -> None:
    scales = {"initial_scale": 2.0**(10 + hvd.rank()), "dynamic_growth_steps": 3}
    plain = keras.optimizers.SGD
    ways = [lambda: Scaler(distribute(OPTIONS, plain(0.1)), **scales)]
    if KERAS_3:
        ways.append(lambda: distribute(OPTIONS, Scaler(plain(0.1), **scales)))
    for make in ways:
        model = compiled(make_model(), make())
        take_steps(model, range(2))
        take_steps(model, range(2, 3), spoilt=is_last(hvd))
        take_steps(model, range(3, 6))
        assert_shared_is_equal(model)
        assert step_report(model).step == 6, "the rank that overflowed took part in every exchange"
        scale = model.optimizer.dynamic_scale if KERAS_3 else model.optimizer.loss_scale
        grown = 2 if not is_last(hvd) else 1  # times in six steps
        assert float(np.asarray(scale)) == scales["initial_scale"] * 2**grown / (2 if is_last(hvd) else 1)


def check_gradients_that_are_missing_or_sparse_are_nobodys_business() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Embedding(30, 4), keras.layers.Flatten(),
                              keras.layers.Dense(1)])
    optimizer = distribute(OPTIONS)
    trained = model.trainable_variables
    optimizer.build(trained)

    @tf.function
    def step(words: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(words) ** 2)
        gradients = tape.gradient(loss, trained)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip([*gradients[:-1], None], trained, strict=True))

    for number in range(4):
        step(tf.constant([[hvd.rank(), 5, 7 + number, 1, 2]]))
    assert_shared_is_equal(model)


def check_two_optimizers_of_one_model() -> None:
    keras.utils.set_random_seed(1)
    model = Gan(OPTIONS)
    model.generator.build((None, 6))
    model.critic.build((None, 20))
    fit(model)
    assert_shared_is_equal(model.generator, model.critic)
    assert step_report(model).step == 8


def check_two_optimizers_in_one_function_take_their_steps_in_one_order() -> None:
    """Loops of GANs are like this: two tapes, and both optimizers in one graph."""
    models = [make_model(seed) for seed in (1, 2)]
    both = [distribute(OPTIONS, keras.optimizers.Adam(0.01)) for _ in models]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            losses = [loss(y, model(x)) for model in models]
        gradients = [tape.gradient(each, model.trainable_variables)
                     for tape, each, model in zip((first, second), losses, models, strict=True)]
        for optimizer, own_gradients, model in zip(both, gradients, models, strict=True):
            optimizer.apply_gradients(zip(own_gradients, model.trainable_variables, strict=True))

    x, y = make_data()
    for start in range(0, 64, 8):
        step(tf.constant(x[start:start + 8]), tf.constant(y[start:start + 8]))
    for optimizer, model in zip(both, models, strict=True):
        with shared_parameters(optimizer):
            assert_equal_everywhere(hvd, {"w": own(model)})
        assert step_report(optimizer).step == 8


def check_k_elements_are_written_in_place_unless_somebody_holds_the_variable() -> None:
    shapes = {"kernel": (3, 3, 8, 8), "bias": (8,), "scale": (), "wide": (7, 5)}
    variables = [tf.Variable(tf.random.normal(shape)) for shape in shapes.values()]
    layout = Layout((name, shape, v.dtype.name) for (name, shape), v in zip(shapes.items(), variables,
                                                                          strict=True))
    replica = VariableReplica(layout, variables)

    def values() -> np.ndarray:
        return np.concatenate([np.array(piece, np.float64) for _, piece in replica.pieces()])

    def places() -> list[int]:
        return [piece.ctypes.data for _, piece in replica.pieces()][:2]

    expected, before = values(), places()
    indices = np.union1d(np.random.default_rng(0).choice(layout.n, 60, replace=False), [576 + 8])
    delta = SparseVector(indices, np.ones(len(indices), np.float32))
    replica.add(delta)
    expected[indices] += 1
    assert places() == before
    np.testing.assert_allclose(values(), expected, atol=1e-6)
    held = tf.identity(variables[0])
    kept = np.array(held)
    replica.add(delta)
    assert np.array_equal(held, kept), "who has read the variable keeps what he read"
    replica.add(RunVector.between(0, np.ones(layout.n, np.float32)))
    expected[indices] += 1
    np.testing.assert_allclose(values(), expected + 1, atol=1e-5)


def check_no_step_copies_a_variable() -> None:
    """TensorFlow would copy if we held its memory, or had written single elements by its own means."""
    model = model_with(optimizer=keras.optimizers.SGD(0.1))
    take_steps(model, range(2))
    places = [addresses(model)]
    for step in range(2, 5):
        take_steps(model, range(step, step + 1))
        places.append(addresses(model))
    assert places == [places[0]] * 4


def addresses(model: Any) -> list[int]:
    return [np.asarray(tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype)).ctypes.data
            for v in map(tensor_of, model.trainable_variables)]


def on_one_host() -> StepAhead:
    """Return options with all ranks as one worker: Horovod averages their gradients, and they take the same steps."""
    needs_ranks(hvd)
    return StepAhead(OkTopk(density=0.05, hierarchical=hvd.size()))


def check_the_ranks_of_a_host_are_alike() -> None:
    model = model_with(on_one_host())
    fit(model)
    assert_equal_everywhere(hvd, {"p": own(model)})
    assert_shared_is_equal(model)
    assert step_report(model).payload_bytes()[0] == 0, "nothing leaves the host"


def check_the_ranks_of_a_host_skip_a_step_together_if_one_overflows() -> None:
    model = compiled(make_model(), Scaler(distribute(on_one_host(), keras.optimizers.SGD(0.1, momentum=0.9))))
    take_steps(model, range(2))
    take_steps(model, range(2, 3), spoilt=is_last(hvd))
    take_steps(model, range(3, 6))
    assert_equal_everywhere(hvd, {"p": own(model)})
    assert_shared_is_equal(model)
