"""`compression=StepAhead(...)`: what models show, save and load is what all ranks share, and the rest is refused.

And which models, optimizers and variables `shared_parameters` and its like take.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.elastic import TensorFlowState

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import Dense, OkTopk, Partial, StepAhead
from horovod_oktopk.tensorflow import load_state, save_state, shared_parameters, step_report, synchronize_replicas
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.state import resume, suspend
from horovod_oktopk.tensorflow.variables import tensor_of
from tests.scenarios.common import assert_equal_everywhere, everywhere, logged, shared_folder, warned
from tests.tensorflow.scenarios.common import (
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
from tests.tensorflow.scenarios.step_ahead import OPTIONS, assert_shared_is_equal, model_with, own, shared, take_steps


class Watch(keras.callbacks.Callback):
    """Comes after BroadcastGlobalVariablesCallback, and notes whether the variables are the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[bool]] = {}

    def note(self, when: str) -> None:
        alike = len(set(everywhere(hvd, own(self.model).tobytes()))) == 1
        self.seen.setdefault(when, []).append(alike)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("training")

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch's end")

    def on_train_end(self, logs: Any = None) -> None:
        self.note("training's end")


class Counting(hvd_keras.callbacks.SharedParameters):
    begun = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.begun += 1
        super().on_train_begin(logs)


class Teaching(keras.Model):
    """A model that is trained, and another that follows it: at every step, or at the end of an epoch."""

    def __init__(self, at_every_step: bool) -> None:
        super().__init__()
        self.student, self.teacher, self.at_every_step = make_model(), make_model(), at_every_step
        self.teacher.trainable = False
        self.norm = keras.layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(self.norm(x, training=training))

    def follow(self) -> None:
        for average, value in zip(self.teacher.variables, self.student.variables, strict=True):
            average.assign(0.5 * average + 0.5 * value)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        if self.at_every_step:
            self.follow()
        return logs


def check_averages_of_each_ranks_own_parameters_are_told_after_fit() -> None:
    inputs = np.random.default_rng(hvd.rank()).standard_normal((32, 20)).astype(np.float32)
    follow = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.follow())
    for at_every_step in (True, False):
        model = Teaching(at_every_step)
        compiled(model, distribute(compression=OPTIONS))
        with logged() as lines:
            model.fit(inputs, np.arange(32) % 4, batch_size=8, epochs=2, verbose=0,
                      callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), follow])
        told = [line for line in lines if "that are not trained" in line]
        assert len(told) == (at_every_step and hvd.size() > 1), lines
        if not at_every_step:
            assert_equal_everywhere(hvd, weights(model.teacher))


def check_weights_that_change_between_two_fits_are_told() -> None:
    model = compiled(make_model(), distribute(compression=OPTIONS))
    fit(model)
    model.set_weights([0.5 * each for each in model.get_weights()])
    with warned() as messages:
        fit(model)
    assert len([each for each in messages if "changed after training had stopped" in each]) == (hvd.size() > 1)


def check_fit_shows_what_ranks_share_in_validation_and_callbacks_and_at_the_end() -> None:
    x, y = np.random.default_rng(5).standard_normal((32, 20)).astype(np.float32), np.arange(32) % 4
    with shared_folder(hvd) as folder:
        path = str(folder / f"{hvd.rank()}-") + "{epoch}.weights.h5"
        checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        batches = Counting(keras.callbacks.ModelCheckpoint(
            str(folder / f"{hvd.rank()}-batch.weights.h5"), save_weights_only=True, save_freq=3))
        model, watch = model_with(), Watch()
        history = fit(model, [broadcast(), checkpoint, watch, batches], epochs=3, validation_data=(x, y))
        saved = [make_model() for _ in range(4)]
        for number, each in enumerate(saved[:3]):
            each.load_weights(str(folder / f"{hvd.rank()}-{number + 1}.weights.h5"))
            assert_equal_everywhere(hvd, weights(each))
        saved[3].load_weights(str(folder / f"{hvd.rank()}-batch.weights.h5"))
        assert_equal_everywhere(hvd, weights(saved[3]))
        everywhere(hvd, "read")
    assert batches.begun == 1
    batches_of_an_epoch = [*[hvd.size() == 1] * 3, True]  # after the last one, for callbacks before the broadcast
    assert watch.seen == {"training": batches_of_an_epoch * 3, "validation": [True] * 3, "epoch's end": [True] * 3,
                          "training's end": [True]}
    assert np.array_equal(own(model), own(saved[2]))
    assert len(set(everywhere(hvd, tuple(map(float, history["val_loss"]))))) == 1
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), history["val_loss"][-1], rtol=1e-4)


def check_an_evaluation_at_the_end_of_an_epoch_leaves_the_parameters_shared() -> None:
    model, first, watch = model_with(), broadcast(), Watch()
    evaluate = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.evaluate(
        np.zeros((4, 20), np.float32), np.zeros(4), verbose=0, callbacks=[first]))
    fit(model, [first, evaluate, watch])
    assert watch.seen["epoch's end"] == [True] * 2


def check_without_the_callback_the_model_is_the_same_after_fit_and_a_warning_says_so() -> None:
    model, watch = model_with(), Watch()
    with logged() as messages:
        fit(model, [watch])
    assert_equal_everywhere(hvd, weights(model))
    assert watch.seen["epoch's end"] == [hvd.size() == 1] * 2
    assert any("first in the list" in message for message in messages)


def check_a_second_fit_goes_on_with_what_was_not_sent() -> None:
    results = []
    for epochs in ((2, 1), (1, 1, 1)):
        model = model_with(optimizer=keras.optimizers.SGD(0.1))
        for number in epochs:
            fit(model, [broadcast()], epochs=number)
        assert step_report(model).step == 12
        results.append(own(model))
    np.testing.assert_allclose(*results, atol=1e-5)  # w - (w - p) rounds


def check_weights_that_are_set_inside_are_shared() -> None:
    """EarlyStopping does this: it puts back the best."""
    model = model_with()
    stop = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)  # the first epoch is best
    first: list[np.ndarray] = []
    spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: first.append(own(model)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model, [broadcast(), spy, stop], epochs=5)
        assert len(first) == 2
        assert np.array_equal(own(model), first[0])
        take_steps(model, range(2))
        with shared_parameters(model):
            model.set_weights([value * 0 for value in model.get_weights()])
        assert not shared(model).any()
        take_steps(model, range(2))
    assert_shared_is_equal(model)


def check_a_state_loaded_in_mid_run_repeats_the_steps_after_it() -> None:
    model = model_with(optimizer=keras.optimizers.SGD(0.1))
    take_steps(model, range(3))
    with shared_folder(hvd) as folder:
        with shared_parameters(model):
            saved = model.get_weights()
            save_state(model, folder / "state")
        take_steps(model, range(3, 6))
        expected = shared(model)
        with shared_parameters(model):
            model.set_weights(saved)
            load_state(model, folder / "state")
        everywhere(hvd, "loaded")
    assert np.array_equal(shared(model), np.concatenate([value.ravel() for value in saved]))
    take_steps(model, range(3, 6))
    assert np.array_equal(shared(model), expected)


def check_a_port_of_horovods_example_starts_from_the_weights_of_rank_0() -> None:
    """Its model is built by the first batch, and its data repeat."""
    x, y = make_data()
    batches = tf.data.Dataset.from_tensor_slices((x.reshape(-1, 5, 4, 1), y)).repeat().shuffle(100).batch(16)
    for compression in (OPTIONS, OkTopk(density=0.05)):
        keras.utils.set_random_seed(1 + hvd.rank())
        layers = keras.layers
        model = keras.Sequential([layers.Conv2D(4, [3, 3], activation="relu"), layers.Dropout(0.25),
                                  layers.BatchNormalization(), layers.Flatten(), layers.Dense(4)])
        optimizer = distribute(compression, keras.optimizers.Adam(0.01))
        compiled(model, optimizer)
        with logged() as lines:
            model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0, callbacks=[
                broadcast(), hvd_keras.callbacks.MetricAverageCallback()])
        assert not lines
        assert_equal_everywhere(hvd, {"w": own(model)})
        assert step_report(model).step == 6


def check_elastic_states_keep_what_ranks_share_and_each_residual() -> None:
    for of_variables, saves in ((False, True), (False, False), (True, True), (True, False)):
        model = model_with(StepAhead(OkTopk(density=0.05)), keras.optimizers.SGD(0.1))
        fit(model, epochs=1)
        take_steps(model, range(2))
        state: Any = (TensorFlowState(list(map(tensor_of, model.trainable_variables))) if of_variables
                      else hvd_keras.KerasState(model))
        if saves:  # else it has what it saved when it was made
            state.save()
        expected = shared(model)
        take_steps(model, range(2, 5))
        after = shared(model)
        state.restore()
        assert np.array_equal(shared(model), expected)
        take_steps(model, range(2, 5))
        assert np.array_equal(shared(model), after)
        state.sync()
        assert_equal_everywhere(hvd, {"w": own(model)})
        take_steps(model, range(1))
        assert_shared_is_equal(model)


def check_a_step_inside_is_refused_and_the_next_one_outside_is_not() -> None:
    model = model_with()
    take_steps(model, range(1))
    with shared_parameters(model):
        assert "inside shared_parameters" in refusal(lambda: fit(model, epochs=1))
    take_steps(model, range(1, 3))
    assert_shared_is_equal(model)


def check_what_cannot_work_is_refused() -> None:
    weight = tf.Variable(tf.ones(3))
    assert "DistributedOptimizer" in refusal(lambda: reduced([weight], lambda: tf.reduce_sum(weight), OPTIONS))
    assert "Adasum" in refusal(lambda: distribute(OPTIONS, op=hvd.Adasum))
    kinds = keras.optimizers
    if KERAS_3:
        several = kinds.MultiOptimizer(kinds.OptimizerMap(kinds.SGD(0.1)))
        assert "each optimizer in it has its own" in refusal(lambda: distribute(OPTIONS, several))
        assert "carry one learning rate" in refusal(lambda: distribute(Partial(Dense()), several))
    assert "use_ema" in refusal(lambda: distribute(OPTIONS, keras.optimizers.SGD(0.1, use_ema=True)))
    assert "Ftrl cannot be used with StepAhead" in refusal(lambda: distribute(OPTIONS, keras.optimizers.Ftrl(0.1)))
    constrained = compiled(make_model(kernel_constraint=keras.constraints.NonNeg()), distribute(OPTIONS))
    assert "kernel' has a constraint" in refusal(lambda: constrained.train_on_batch(*make_data())).replace(":0", "")
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(4), name="spectral")
    assert "the layer 'spectral'" in refusal(lambda: fit(
        compiled(keras.Sequential([keras.layers.Input((20,)), spectral]), distribute(OPTIONS)), [broadcast()]))
    assert "jit_compile=False" in refusal(lambda: fit(model_with(jit_compile=True)))
    model = compiled(make_model(dtype="bfloat16"), distribute(OPTIONS))
    assert "float32 or float64" in refusal(lambda: fit(model))
    assert "tf.function" in refusal(tf.function(lambda: shared_parameters(model).__enter__()))
    optimizer = distribute(StepAhead(Dense()))
    extra = tf.Variable(tf.ones(2))
    assert "local" in refusal(lambda: distribute(OPTIONS).register_local_var(weight))
    if not KERAS_3:
        optimizer.apply_gradients([(tf.ones(3), weight)])
        assert "after the first step" in refusal(
            lambda: optimizer.apply_gradients([(weight, weight), (extra, extra)]))


def inside(model: Any, *targets: Any) -> bytes:
    """Return what the model holds inside `shared_parameters(*targets)`."""
    with shared_parameters(*targets):
        return own(model).tobytes()


def check_lists_and_single_variables_serve_as_the_model_does() -> None:
    model, other = model_with(), make_model(2)
    take_steps(model, range(3))
    expected = shared(model).tobytes()
    assert hvd.size() == 1 or own(model).tobytes() != expected
    first = model.trainable_variables[0]
    for target in ([model], (other, [model]), [model.optimizer], model.layers, first, [first], [first, other],
                   model.trainable_variables):
        assert inside(model, target) == expected, target
    assert inside(model, other) == own(model).tobytes()
    assert inside(model) == inside(model, []) == own(model).tobytes()
    layers, model.trainable = list(model.layers), False
    with shared_parameters(layers):  # that are frozen now
        model.trainable = True
        assert own(model).tobytes() == expected


def check_what_has_no_variables_is_refused() -> None:
    model = model_with()
    take_steps(model, range(1))
    for wrong, name in ((None, "NoneType"), ([None], "NoneType"), ({"model": model}, "dict"), ("model", "str"),
                        (keras.optimizers.SGD, "type"), (model.get_weights(), "ndarray")):
        for function in (lambda wrong: inside(model, wrong), synchronize_replicas):
            message = refusal(functools.partial(function, wrong))
            assert f"got {name}" in message, message
            assert "(model)" in message
    refusal(functools.partial(load_state, [model], "file"))
    assert step_report([model]) is step_report(model)
    with shared_parameters(keras.layers.Dense(3), make_model(2), keras.optimizers.SGD()):
        synchronize_replicas(model, model.trainable_variables, keras.optimizers.SGD())


def check_optimizers_of_the_same_variables_take_turns() -> None:
    """Optimizers of two tasks do, over a trunk that both have. They come as near to the optimum as one does."""
    target = np.linspace(1, 2, 100, dtype=np.float32)
    distances = []
    for count in (1, 2):
        weight = variable_of(np.zeros(100, np.float32))
        optimizers = [distribute(StepAhead(OkTopk(density=0.1)), keras.optimizers.SGD(0.1)) for _ in range(count)]
        for each in optimizers:
            each.build([weight])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(60):
                gradient = tf.convert_to_tensor(weight) - target * (0.5 + hvd.rank())
                optimizers[step % count].apply_gradients([(gradient, weight)])
                if step % 15 == 14:  # as between two calls of fit
                    for act, each in itertools.product((suspend, resume), optimizers):
                        act(each)
        with shared_parameters(optimizers):
            found = np.array(tf.convert_to_tensor(weight))
        assert len(set(everywhere(hvd, found.tobytes()))) == 1
        distances.append(np.abs(found - target * hvd.size() / 2).max())
    assert distances[1] < 2 * distances[0] + 0.1, distances
