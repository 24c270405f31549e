"""Loss scaling of both Keras: every rank skips the same steps, and the residual keeps its unit."""

from __future__ import annotations

import functools
import logging
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk.tensorflow import OkTopk, StepAhead, step_report
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.variables import tensor_of
from tests.scenarios.common import DENSE, assert_equal_everywhere, everywhere, logged
from tests.tensorflow.scenarios.common import (
    EAGER_AND_GRAPH,
    broadcast,
    compiled,
    distribute,
    fit,
    keras,
    make_data,
    make_model,
    reduced,
    refusal,
    variable_of,
    weights,
)

Scaler = keras.mixed_precision.LossScaleOptimizer
OPTIONS = OkTopk(density=0.1, threshold_interval=1)


def gradient_of(step: int) -> np.ndarray:
    return np.random.default_rng((step, hvd.rank())).integers(-64, 65, 40).astype(np.float32)


def scale_of(scaler: Any) -> float:
    return float(scaler.dynamic_scale.numpy() if KERAS_3 else scaler.loss_scale.numpy())


def scaled_loss(scaler: Any, loss: tf.Tensor) -> tf.Tensor:
    return scaler.scale_loss(loss) if KERAS_3 else scaler.get_scaled_loss(loss)


class Training:
    """One variable whose gradient is given; a tape, or a distributed optimizer inside or around a scaler."""

    def __init__(self, strategy: str, scaled: bool, in_graph: bool, initial_scale: float = 4.0) -> None:
        zeros = np.zeros(40, np.float32)
        self.weight = tf.Variable(zeros) if strategy == "tape" else variable_of(zeros)
        plain = keras.optimizers.SGD(1.0)

        def scaling(optimizer: Any) -> Any:
            return Scaler(optimizer, initial_scale=initial_scale, dynamic_growth_steps=1) if scaled else optimizer

        if strategy == "tape":
            self.optimizer = scaling(plain)
        elif strategy == "inside":
            self.optimizer = scaling(distribute(OPTIONS, plain, op=hvd.Sum))
        else:
            self.optimizer = distribute(OPTIONS, scaling(plain), op=hvd.Sum)
        self.strategy, self.scaled = strategy, scaled
        self.optimizer.build([self.weight])
        self.run = tf.function(self._step) if in_graph else self._step

    def _step(self, gradient: tf.Tensor) -> None:
        if self.strategy != "tape" and not KERAS_3:
            self.optimizer.minimize(lambda: tf.reduce_sum(self.weight * gradient), [self.weight])
            return
        self.finish(*self.begin(gradient))

    def begin(self, gradient: tf.Tensor) -> tuple[tf.GradientTape, tf.Tensor]:
        """Return a tape, and the scaled loss on it."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.convert_to_tensor(self.weight) * gradient)
            return tape, scaled_loss(self.optimizer, loss) if self.scaled else loss

    def finish(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        """Reduce the gradients and apply them."""
        if self.strategy != "tape":
            self.optimizer.apply(tape.gradient(loss, [self.weight]), [self.weight])
            return
        tape = hvd.DistributedGradientTape(tape, compression=OPTIONS, op=hvd.Sum)
        grads = tape.gradient(loss, [self.weight])
        if self.scaled and not KERAS_3:
            grads = self.optimizer.get_unscaled_gradients(grads)
        self.optimizer.apply_gradients(zip(grads, [self.weight], strict=True))

    def step(self, step: int, poison: bool = False) -> None:
        gradient = gradient_of(step)
        if poison and hvd.rank() == 0:
            gradient[3] = np.inf
        self.run(tf.constant(gradient))

    def value(self) -> np.ndarray:
        return np.array(tf.convert_to_tensor(self.weight))


def ways() -> list[tuple[str, bool]]:
    """Return the ways: tf-keras has its scaler around the distributed optimizer; Keras 3 has both."""
    found = ("tape", "inside", "around") if KERAS_3 else ("tape", "inside")
    return [(strategy, in_graph) for strategy in found for in_graph in (True, False)]


def check_losses_of_two_scalers_that_are_scaled_before_either_is_reduced() -> None:
    """Training steps of GANs are usually like this."""
    for strategy, in_graph in ways():
        if strategy == "inside" and not KERAS_3:
            continue  # whose optimizer scales and reduces at once
        results = []
        for scaled in (False, True):
            pair = [Training(strategy, scaled, False, initial_scale) for initial_scale in (4.0, 64.0)]

            def both(gradient: tf.Tensor, pair: Any = pair) -> None:
                begun = [training.begin(gradient * (index + 1.0)) for index, training in enumerate(pair)]
                for training, (tape, loss) in zip(pair, begun, strict=True):
                    training.finish(tape, loss)

            run = tf.function(both) if in_graph else both
            for step in range(5):
                if scaled and step == 3:  # of one the step is skipped, and its scale goes down
                    pair[0].step(99, poison=True)
                run(tf.constant(gradient_of(step)))
            results.append([training.value() for training in pair])
        assert [scale_of(training.optimizer) for training in pair] == [4.0 * 2**4, 64.0 * 2**5], strategy
        assert np.array_equal(*results), f"{strategy}, {in_graph=}"


def check_a_part_or_a_sum_of_scaled_losses_is_refused() -> None:
    pair = [Training("tape", True, False) for _ in range(2)]
    for of in (lambda first, _: 0.5 * first, lambda first, second: first + second):
        with tf.GradientTape() as tape:
            losses = [scaled_loss(training.optimizer, tf.reduce_sum(training.weight)) for training in pair]
            loss = of(*losses)
        distributed = hvd.DistributedGradientTape(tape, compression=OPTIONS)
        action = functools.partial(distributed.gradient, loss, [pair[0].weight])
        assert "scaled loss itself" in refusal(action)


def check_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """And the residual keeps its unit while the scale grows: the steps that are taken are those without a scale."""
    for strategy, in_graph in ways():
        results = []
        for scaled, overflows in ((False, ()), (True, ()), (True, (0, 3))):
            training = Training(strategy, scaled, in_graph)
            for step in range(6):
                if step in overflows:
                    before, scale = training.value(), scale_of(training.optimizer)
                    training.step(99, poison=True)
                    assert np.array_equal(training.value(), before)
                    assert scale_of(training.optimizer) == scale / 2
                training.step(step)
            assert_equal_everywhere(hvd, {"weight": training.value()})
            assert not scaled or scale_of(training.optimizer) == 4.0 * 2**(6 - len(overflows)), strategy
            results.append(training.value())
        assert np.abs(results[0]).max() > 0
        for found, told in zip(results[1:], ("the scale", "a skipped step"), strict=True):
            assert np.array_equal(found, results[0]), f"{told} left a trace: {strategy}, {in_graph=}"


def check_an_unscaled_loss_after_a_scaled_one_has_no_scale() -> None:
    scaled = Training("tape", True, in_graph=False)
    scaled.step(0)

    @tf.function
    def loss_that_nobody_reduces() -> tf.Tensor:
        return scaled_loss(scaled.optimizer, tf.constant(1.0))

    for _ in range(2):
        weight = tf.Variable(tf.ones(4), name="unscaled")
        [gradient] = reduced([weight], functools.partial(tf.reduce_sum, weight), op=hvd.Average)
        assert gradient.numpy().tolist() == [1.0] * 4
        loss_that_nobody_reduces()


def step_of_both(optimizer: Any, weight: Any) -> None:
    """Take a step with a distributed tape and a distributed optimizer."""
    grads = reduced([weight], lambda: tf.reduce_sum(tf.convert_to_tensor(weight)))
    optimizer.apply_gradients(zip(grads, [weight], strict=True))


def check_a_tape_and_an_optimizer_reduce_once() -> None:
    """Whatever is reduced twice would be divided by another sum, and have its residual added twice."""
    for way in EAGER_AND_GRAPH:
        weight = variable_of(np.zeros(3, np.float32))
        optimizer = distribute(DENSE, keras.optimizers.SGD(1.0), op=hvd.Sum)
        optimizer.build([weight])
        way(functools.partial(step_of_both, optimizer, weight))()
        assert np.array(tf.convert_to_tensor(weight)).tolist() == [-float(hvd.size())] * 3


def check_a_tape_and_an_optimizer_reduce_rows_once() -> None:
    weight = variable_of(np.zeros((3, 2), np.float32))
    optimizer = distribute(DENSE, keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.build([weight])
    tensor = tensor_of(weight)
    grads = reduced([tensor], lambda: tf.reduce_sum(tf.gather(tensor, [0, 1])))
    assert isinstance(grads[0], tf.IndexedSlices)
    optimizer.apply_gradients(zip(grads, [weight], strict=True))
    assert np.array(tf.convert_to_tensor(weight)).tolist() == [[-float(hvd.size())] * 2] * 2 + [[0.0, 0.0]]


def check_fit_with_the_mixed_float16_policy() -> None:
    for compression in (OkTopk(density=0.1), StepAhead(OkTopk(density=0.05))):
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            model = compiled(make_model(dtype="float32"), distribute(compression))
            history = fit(model, epochs=3)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        assert isinstance(model.optimizer, Scaler)
        assert history["loss"][-1] < history["loss"][0]
        assert step_report(model).step == 12
        assert isinstance(compression, StepAhead) or len(set(everywhere(hvd, scale_of(model.optimizer)))) == 1
        assert_equal_everywhere(hvd, weights(model))


def check_a_loss_scale_that_is_too_high_is_not_taken_for_bad_data() -> None:
    scaler = Scaler(keras.optimizers.SGD(1e-7), initial_scale=2.0**126)
    model = compiled(make_model(), distribute(StepAhead(OkTopk(density=0.05)), scaler), loss_weights=[1e6])
    with logged(logging.INFO) as lines:
        fit(model, epochs=1)
    assert scale_of(scaler) < 2.0**126
    assert any("at its loss scale" in line for line in lines) == (hvd.size() > 1), lines
    assert not any("look at its data" in line for line in lines), lines


def check_variables_of_16_bits_start_alike() -> None:
    """Horovod cannot broadcast bfloat16, which a rank that joins needs as well."""
    for starts in (lambda model: fit(model, [broadcast()], epochs=1),
                   lambda model: hvd_keras.KerasState(model).sync()):
        model = compiled(make_model(seed=hvd.rank(), dtype="bfloat16"), distribute(OPTIONS))
        starts(model)
        assert model.weights[-1].dtype == "bfloat16"
        assert_equal_everywhere(hvd, {name: values.astype(np.float32) for name, values in weights(model).items()})


def check_variables_in_bfloat16_train_wherever_horovod_reduces_them() -> None:
    """Its operations do not take them: dense training, sparse gradients, a mean of what has drifted apart."""
    in_time = (hvd_keras.Partial(OPTIONS, in_order=False),) if hvd.mpi_enabled() else ()
    for compression in (hvd_keras.Dense(), hvd.Compression.none, OPTIONS, *in_time):
        keras.utils.set_random_seed(1)
        embedding = [] if compression in in_time else [keras.layers.Embedding(7, 5, dtype="bfloat16"),
                                                       keras.layers.Flatten()]
        model = keras.Sequential([keras.layers.Input((20,)), *embedding, keras.layers.Dense(4, dtype="bfloat16")])
        compiled(model, distribute(compression))
        before = weights(model)
        x, y = make_data()
        model.fit(np.abs(x).astype(np.int32) % 7, y, batch_size=16, epochs=2, verbose=0, callbacks=[broadcast()])
        assert model.weights[0].dtype == "bfloat16"
        assert any((values != before[name]).any() for name, values in weights(model).items())
        assert_equal_everywhere(hvd, {name: values.astype(np.float32) for name, values in weights(model).items()})


def check_a_dense_tape_reduces_bfloat16() -> None:
    variable = tf.Variable(tf.ones(3, tf.bfloat16))
    [gradient] = reduced([variable], lambda: tf.reduce_sum(variable) * tf.cast(hvd.rank() + 1, tf.bfloat16),
                         hvd_keras.Dense())
    assert gradient.dtype == tf.bfloat16
    assert (gradient.numpy() == sum(range(1, hvd.size() + 1))).all()
