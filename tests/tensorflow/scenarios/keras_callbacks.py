"""Horovod's callbacks, under both Kerases: each gives what Horovod's formula says. And the warm-up of the density."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import Dense, OptionError, PluginError
from horovod_oktopk.tensorflow import OkTopk, StepAhead, step_report
from horovod_oktopk.tensorflow.private import velocities
from horovod_oktopk.tensorflow.variables import tensor_of, variables_in
from tests.scenarios.common import DENSE, everywhere, flat, raised_everywhere, shared_folder
from tests.tensorflow.scenarios.common import broadcast, compiled, distribute, fit, keras, make_model, weights

BATCHES = 4
"""Number of batches of an epoch of `fit`."""
MODES = (OkTopk(density=0.1), StepAhead(OkTopk(density=0.1)))


def rates_of(callback: Any, epochs: int, compression: Any = DENSE) -> tuple[list[float], list[float]]:
    """Return the learning rate of each batch, and those that the logs have of each epoch."""
    seen: list[float] = []
    model = compiled(make_model(), distribute(compression, keras.optimizers.SGD(0.5, momentum=0.9)))
    spy = keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: seen.append(float(tensor_of(model.optimizer.learning_rate))))
    history = fit(model, [broadcast(), callback, spy], epochs)
    assert step_report(model).step == epochs * BATCHES
    return seen, history["lr"]


def check_the_warm_up_sets_horovods_learning_rate_at_every_batch() -> None:
    size = hvd.size()
    expected = [0.5 / size * ((epoch + (batch + 1) / BATCHES) * (size - 1) / 2 + 1)
                for epoch in range(2) for batch in range(BATCHES)] + [0.5] * BATCHES
    for compression in MODES:
        warm_up = hvd_keras.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, verbose=1)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            rates, logged = rates_of(warm_up, 3, compression)
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
        np.testing.assert_allclose(logged, expected[BATCHES - 1::BATCHES], rtol=1e-6)
        said = "Epoch 2: finished gradual learning rate warmup to 0.5."
        assert printed.getvalue().count(said) == (hvd.rank() == 0)


def check_the_warm_up_reaches_its_end_though_it_sees_few_of_the_batches() -> None:
    model = compiled(make_model(), distribute(DENSE), steps_per_execution=BATCHES)
    warm_up = hvd_keras.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2)
    assert fit(model, [broadcast(), warm_up], 3)["lr"][1:] == [0.5, 0.5]


def check_a_schedule_sets_the_learning_rate_between_its_epochs() -> None:
    schedule = functools.partial(hvd_keras.callbacks.LearningRateScheduleCallback, initial_lr=0.2)
    for callback, expected in (
            (schedule(multiplier=0.1, start_epoch=1, end_epoch=3), [0.5, 0.2, 0.02, 0.02]),
            (schedule(multiplier=lambda epoch: 1 / (1 + epoch)), [0.2, 0.1, 0.2 / 3, 0.05])):
        rates, logged = rates_of(callback, 4)
        np.testing.assert_allclose(rates, np.repeat(expected, BATCHES), rtol=1e-6)
        np.testing.assert_allclose(logged, expected, rtol=1e-6)


def check_a_schedule_without_stairs_sets_the_learning_rate_at_every_batch() -> None:
    epochs = np.arange(2 * BATCHES) / BATCHES
    for steps in (None, 8):
        rates, _ = rates_of(hvd_keras.callbacks.LearningRateScheduleCallback(
            0.2, lambda epoch: 1 + epoch, staircase=False, steps_per_epoch=steps), 2)
        times = epochs if steps is None else np.repeat([0, 1], BATCHES) + np.tile(np.arange(BATCHES) / steps, 2)
        np.testing.assert_allclose(rates, 0.2 * (1 + times), rtol=1e-6)
    rates, _ = rates_of(hvd_keras.callbacks.LearningRateScheduleCallback(0.2, 0.5, staircase=False), 2)
    np.testing.assert_allclose(rates, 0.2 * 0.5 ** epochs, rtol=1e-6)


def velocity_after(corrects: bool, nesterov: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weight, velocity and gradient of a linear model after four batches of one gradient."""
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False,
                                                                          kernel_initializer="zeros")])
    optimizer = distribute(DENSE, keras.optimizers.SGD(1.0, momentum=0.5, nesterov=nesterov))
    model.compile(optimizer, loss=lambda truth, out: tf.reduce_mean(out), jit_compile=False)
    x = np.ones((8, 3), np.float32) * [1.0, 2.0, -4.0] * (1 + hvd.rank())
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(
        1.0, lambda epoch: 2.0 ** (4 * epoch), staircase=False, momentum_correction=corrects)
    model.fit(x, np.zeros(8), batch_size=2, verbose=0, shuffle=False, callbacks=[broadcast(), schedule])
    gradient = np.array([1.0, 2.0, -4.0]) * (1 + hvd.size()) / 2
    return weights(model)["000"].ravel(), np.ravel(velocities(optimizer)[0]), gradient


def check_the_velocity_is_corrected_by_the_ratio_of_the_learning_rates() -> None:
    """Corrected, it is the learning rate times a sum of gradients."""
    for corrects in (True, False):
        for nesterov in (True, False):
            weight, velocity, gradient = velocity_after(corrects, nesterov)
            expected, moved, before = np.zeros(3), np.zeros(3), 1.0
            for rate in (1.0, 2.0, 4.0, 8.0):
                expected = 0.5 * (rate / before if corrects else 1) * expected - rate * gradient
                moved += 0.5 * expected - rate * gradient if nesterov else expected
                before = rate
            np.testing.assert_allclose(velocity, expected, rtol=1e-6)
            np.testing.assert_allclose(weight, moved, rtol=1e-6)


def check_the_velocity_of_optimizers_that_have_one_is_corrected() -> None:
    """And no moment, which has no learning rate in it."""
    optimizers = keras.optimizers
    scaled = keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(1.0, momentum=0.5))
    for optimizer, expected in ((optimizers.SGD(1.0, momentum=0.5), {4.0}), (scaled, {4.0}),
                                (optimizers.RMSprop(1.0, momentum=0.5), {1.0, 4.0}), (optimizers.Adam(1.0), {1.0})):
        model = compiled(make_model(), distribute(OkTopk(density=0.1), optimizer))
        optimizer.build(model.trainable_variables)
        slots = [tensor_of(v) for v in variables_in(getattr(optimizer, "inner_optimizer", optimizer))
                 if tuple(v.shape) == (20, 24)]
        for slot in slots:
            slot.assign(tf.ones_like(slot))
        schedule = hvd_keras.callbacks.LearningRateScheduleCallback(2.0, 2.0, start_epoch=1)
        schedule.set_model(model)
        schedule.on_train_begin()
        for epoch in (1, 2):
            schedule.on_epoch_begin(epoch)
            schedule.on_train_batch_begin(0)
        assert float(tensor_of(optimizer.learning_rate)) == 4.0
        assert {float(value) for slot in slots for value in slot.numpy().ravel()} == expected


def check_a_learning_rate_that_cannot_be_set_is_an_error_on_all_ranks() -> None:
    callbacks = hvd_keras.callbacks
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = compiled(make_model(), distribute(DENSE, keras.optimizers.SGD(decay)))
    for callback in (callbacks.LearningRateWarmupCallback(0.1), callbacks.LearningRateScheduleCallback(0.1, 0.5)):
        message = raised_everywhere(hvd, PluginError, functools.partial(fit, model, [callback]))[0]
        assert f"{type(callback).__name__} sets the optimizer's learning rate, which is a schedule" in message
    raised_everywhere(hvd, OptionError, lambda: callbacks.LearningRateWarmupCallback(None))


def check_the_warm_up_needs_the_number_of_batches() -> None:
    model = compiled(make_model(), distribute(DENSE))
    data = tf.data.Dataset.from_generator(
        lambda: iter([(np.zeros((2, 20), np.float32), np.zeros(2, np.int64))]),
        output_signature=(tf.TensorSpec((2, 20)), tf.TensorSpec(2, tf.int64)))
    warm_up = hvd_keras.callbacks.LearningRateWarmupCallback(0.1)
    message = raised_everywhere(hvd, OptionError, lambda: model.fit(data, verbose=0, callbacks=[warm_up]))[0]
    assert "give steps_per_epoch=" in message


def check_the_best_model_is_saved() -> None:
    """With StepAhead, too: what all ranks share then."""
    for compression in MODES:
        with shared_folder(hvd) as folder:
            model = compiled(make_model(), distribute(compression))
            kept: list[np.ndarray] = []
            scores = iter([1.0, 3.0, 2.0])
            score = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, scores=scores: logs.update(score=next(scores)))
            keep = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, kept=kept, model=model: kept.append(flat(weights(model))))
            best = hvd_keras.callbacks.BestModelCheckpoint("score", mode="max")
            best.filepath = folder / "best.keras"
            fit(model, [broadcast(), score, keep, *[best] * (hvd.rank() == 0)], epochs=3)
            hvd.allgather_object("saved")
            found = flat(weights(keras.models.load_model(folder / "best.keras")))
            assert np.array_equal(found, kept[1])
            assert not np.array_equal(found, kept[2])


def check_a_best_model_without_a_file_is_an_error() -> None:
    for only in (True, False):
        best = hvd_keras.callbacks.BestModelCheckpoint(save_weights_only=only)
        assert best.filepath is None
        model = compiled(make_model(), distribute(DENSE))
        raised_everywhere(hvd, OptionError, functools.partial(fit, model, [best]))


def check_the_density_warms_up_to_that_of_the_options() -> None:
    fractions = (0.5, 0.25, 0.1, 0.1) if hvd.size() > 1 else (1, 1, 1, 1)  # one rank compresses nothing
    for compression in MODES:
        model = compiled(make_model(), distribute(compression))
        callbacks = hvd_keras.callbacks
        history = fit(model, [broadcast(), callbacks.DensityWarmup([0.5, 0.25, 0.05]), callbacks.StepReportLogger()],
                      epochs=4)
        assert history["oktopk_k"] == [round(share * step_report(model).n) for share in fractions]


def check_the_density_of_a_plain_optimizer_cannot_warm_up() -> None:
    model = compiled(make_model(), keras.optimizers.SGD(0.1))
    raised_everywhere(hvd, PluginError, lambda: fit(model, [hvd_keras.callbacks.DensityWarmup()]))


def make_normalized() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input((20,)), keras.layers.BatchNormalization(), keras.layers.Dense(4)])


def check_local_variables_are_not_broadcast() -> None:
    def begun(make: Callable[[Any, Any], Any]) -> list[tuple[float, float]]:
        """Return each rank's mean and variance after the broadcast; before, they are the rank's number."""
        model = compiled(make_normalized(), distribute(DENSE))
        mean, variance = model.layers[0].moving_mean, model.layers[0].moving_variance
        for variable in (mean, variance):
            variable.assign(np.full(20, float(hvd.rank())))
        callback = make(mean, variance)
        callback.set_model(model)
        callback.on_train_begin()
        return everywhere(hvd, tuple(float(tensor_of(each)[0]) for each in (mean, variance)))

    def registered(mean: Any, variance: Any) -> Any:
        callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, "/cpu:0")
        callback.register_local_var(variance)
        return callback

    ranks = [float(rank) for rank in range(hvd.size())]
    callback = functools.partial(hvd_keras.callbacks.BroadcastGlobalVariablesCallback, 0, device="")
    assert begun(lambda mean, variance: callback()) == [(0.0, 0.0)] * len(ranks)
    assert begun(lambda mean, variance: callback(local_variables=mean)) == [(rank, 0.0) for rank in ranks]
    assert begun(lambda mean, variance: callback(local_variables=[mean, variance])) == [(r, r) for r in ranks]
    assert begun(registered) == [(0.0, rank) for rank in ranks]


def check_local_variables_must_be_variables_that_all_ranks_need_not_share() -> None:
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback
    raised_everywhere(hvd, OptionError, lambda: callback(0, local_variables=[1.0]))
    model = compiled(make_model(), distribute(MODES[1]))
    local = callback(0, local_variables=model.trainable_variables[-1:])
    assert "StepAhead" in raised_everywhere(hvd, PluginError, lambda: fit(model, [local]))[0]


def check_broadcasts_cause_no_warnings_of_retracing() -> None:
    heard: list[str] = []
    handler = logging.Handler()
    with mock.patch.object(handler, "emit", lambda record: heard.append(record.getMessage())):
        tf.get_logger().addHandler(handler)
        for _ in range(8):
            callback = broadcast()
            callback.set_model(compiled(make_model(), distribute(DENSE)))
            callback.on_train_begin()
        tf.get_logger().removeHandler(handler)
    assert not [message for message in heard if "retracing" in message]


class Interrupted(Exception):
    """An error that a callback raises in the middle of an epoch."""


class Interrupt(keras.callbacks.Callback):
    """Notes epoch and batch of the state; ends fit after batch 1 of the second epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.seen = state, []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.state.epoch, self.state.batch))
        if self.state.epoch == 1 and batch == 2:
            raise Interrupted

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((self.state.epoch, self.state.batch))


def check_elastic_callbacks_update_and_commit_the_state() -> None:
    elastic = hvd_keras.elastic
    for compression in (*MODES, Dense()):
        model = compiled(make_model(), distribute(compression))
        state = elastic.KerasState(model, batch=0, epoch=0)
        interrupt, committed = Interrupt(state), []
        keep = keras.callbacks.LambdaCallback(
            on_batch_end=lambda batch, logs, model=model, to=committed: to.append(shared_weights(model)))
        updates = [elastic.UpdateEpochStateCallback(state), elastic.UpdateBatchStateCallback(state),
                   elastic.CommitStateCallback(state, batches_per_commit=2)]
        with contextlib.suppress(Interrupted):
            fit(model, [broadcast(), *updates, keep, interrupt])
        assert interrupt.seen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 0), (1, 1), (1, 2)]
        state.restore()
        assert (state.epoch, state.batch) == (1, 1)
        assert np.array_equal(shared_weights(model), committed[5])


def shared_weights(model: Any) -> np.ndarray:
    with hvd_keras.shared_parameters(model):
        return flat(weights(model))
