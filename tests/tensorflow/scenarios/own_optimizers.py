"""Keras models with a training step of their own: one that is never called as a whole, a GAN with two optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import AgreementError
from horovod_oktopk.tensorflow import OkTopk, load_state, save_state, set_density, step_report
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.registry import each_run_of
from horovod_oktopk.tensorflow.variables import variables_in
from tests.scenarios.common import (
    DENSE,
    assert_equal_everywhere,
    everywhere,
    flat,
    logged,
    needs,
    needs_ranks,
    raised_everywhere,
    shared_folder,
)
from tests.tensorflow.scenarios.common import broadcast, distribute, fit, keras, weights

layers = keras.layers


def minimize(optimizer: Any, loss: Any, trained: list[Any], tape: Any) -> None:
    trainable = [variable for layer in trained for variable in layer.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, trainable), trainable, strict=True))


class Autoencoder(keras.Model):
    """Its training step calls its layers, and never the model, so `built` stays False."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(6), layers.Dense(20)

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2)
        minimize(self.optimizer, loss, [self.encoder, self.decoder], tape)
        return {"loss": loss}


class Gan(keras.Model):
    """Two optimizers: one is an attribute, one lies in a dict. `compile` gives it another, which nobody uses."""

    def __init__(self, compression: Any, rate: float = 0.05) -> None:
        super().__init__()
        self.generator, self.critic = layers.Dense(20), layers.Dense(1)
        self.generates = distribute(compression, keras.optimizers.Adam(rate))
        self.others = {"criticises": self.optimizer_of_critic(compression, keras.optimizers.SGD(rate, momentum=0.5))}
        self.compile(jit_compile=False)

    def optimizer_of_critic(self, compression: Any, plain: Any) -> Any:
        return distribute(compression, plain)

    def tape_of_critic(self, tape: Any) -> Any:
        return tape

    def variables_of(self, name: str) -> list[Any]:
        return variables_in(self.generates if name == "generates" else self.others[name])

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(x[:, :6])
            loss = tf.reduce_mean(tf.square(self.critic(made) - 1.0))
            of_critic = tf.reduce_mean(tf.square(self.critic(x) - 1.0) + tf.square(self.critic(made)))
        minimize(self.others["criticises"], of_critic, [self.critic], self.tape_of_critic(tape))
        minimize(self.generates, loss, [self.generator], tape)
        return {"loss": loss}


class GanWithATape(Gan):
    """A GAN whose critic has a plain optimizer, and a distributed tape."""

    def optimizer_of_critic(self, compression: Any, plain: Any) -> Any:
        self.compression = compression
        return plain

    def tape_of_critic(self, tape: Any) -> Any:
        return hvd.DistributedGradientTape(tape, compression=self.compression)


def state(optimizer: Any) -> dict[str, np.ndarray]:
    return {f"{index:03}": np.array(variable) for index, variable in enumerate(variables_in(optimizer))}


def check_a_gan_starts_alike_with_the_state_of_its_own_optimizers() -> None:
    """And so does a model that is never called."""
    keras.utils.set_random_seed(1 + hvd.rank())
    autoencoder = Autoencoder()
    autoencoder.compile(distribute(DENSE))
    gan = Gan(DENSE, rate=0.05 * (1 + hvd.rank() * KERAS_3))  # in tf-keras it is no variable of the optimizer's
    for model in (autoencoder, gan):
        fit(model, [broadcast()])
        assert len(weights(model)) == 4
        assert_equal_everywhere(hvd, weights(model))
    for optimizer in (gan.generates, gan.others["criticises"]):
        assert_equal_everywhere(hvd, state(optimizer))


def check_ranks_with_other_variables_all_raise() -> None:
    needs(KERAS_3, "Keras 3")
    needs_ranks(hvd)
    model = Gan(hvd.Compression.none)
    if hvd.rank() == 0:
        model.average = layers.Dense(3, name="average")
        model.average.build((None, 2))
    message = raised_everywhere(hvd, AgreementError, lambda: fit(model, [broadcast()]))[0]
    assert "rank 0: float32 of shape (2, 3)" in message


def check_what_one_rank_has_restored_is_taken_after_the_first_batch() -> None:
    """Its variables have other names then."""
    needs(KERAS_3, "Keras 3")
    keras.utils.set_random_seed(1 + hvd.rank())
    model = keras.Sequential([layers.Dense(24, activation="relu"), layers.Dense(4)])
    model.compile(distribute(DENSE, keras.optimizers.Adam(0.01)),
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if hvd.rank() == 0:
        model.build((None, 20))
        model.optimizer.build(model.trainable_variables)
    fit(model, [broadcast()])
    assert_equal_everywhere(hvd, weights(model))
    assert_equal_everywhere(hvd, state(model.optimizer))


def fit_gan(steps: range, callbacks: Any = (), model: Any = None) -> Any:
    """Fit the model for these epochs; a new one, if none is given. Return it."""
    keras.utils.set_random_seed(1)
    model = model or Gan(OkTopk(density=0.1))
    fit(model, callbacks, epochs=steps.stop, initial_epoch=steps.start)
    return model


def residuals(model: Any) -> list[np.ndarray]:
    return [run.mode.read_residual() for run in each_run_of(model)]


def check_a_gans_residuals_are_saved_and_come_back() -> None:
    """Optimizers first step in another order than that in which the model has them."""
    uninterrupted = fit_gan(range(4))
    with shared_folder(hvd) as folder:
        saved = fit_gan(range(2), [hvd_keras.callbacks.StateCheckpoint(folder / "residuals")])
        assert (folder / "residuals").exists()
        resumed = Gan(OkTopk(density=0.1))
        fit_gan(range(1), model=resumed)  # makes its variables
        for name in ("generates", "criticises"):
            for mine, theirs in zip(resumed.variables_of(name), saved.variables_of(name), strict=True):
                mine.assign(theirs)
        resumed.set_weights(saved.get_weights())
        fit_gan(range(2, 4), [hvd_keras.callbacks.StateCheckpoint(folder / "other", restore=folder / "residuals")],
                resumed)
        everywhere(hvd, "done")
    assert step_report(resumed).step == step_report(uninterrupted).step == 16
    assert np.array_equal(flat(weights(resumed)), flat(weights(uninterrupted)))
    assert len(residuals(resumed)) == 2
    for mine, theirs in zip(residuals(resumed), residuals(uninterrupted), strict=True):
        assert np.array_equal(mine, theirs)
        assert mine.any()


def check_a_models_own_optimizers_get_another_density_together() -> None:
    model = fit_gan(range(1))
    set_density(model, 0.5)
    fit(model)
    reports = [run.mode.report for run in each_run_of(model)]
    assert [report.k for report in reports] == [round(0.5 * report.n) for report in reports]
    assert len(reports) == 2


def check_what_a_tape_reduces_beside_an_optimizer_is_saved_by_its_variables() -> None:
    keras.utils.set_random_seed(1)
    model, again = (GanWithATape(OkTopk(density=0.1)) for _ in range(2))
    with shared_folder(hvd) as folder:
        with pytest.warns(UserWarning, match="save_state of what has a distributed optimizer"):
            fit(model, [hvd_keras.callbacks.StateCheckpoint(folder / "of the optimizer")])
        with pytest.warns(UserWarning, match="set_density of what has a distributed optimizer"):
            set_density(model, 0.5)
        variables = model.critic.trainable_variables
        with warnings.catch_warnings(action="error"):
            save_state(variables, folder / "of the tape")
            set_density(variables, 0.5)
        fit(again, epochs=1)
        load_state(again.critic.trainable_variables, folder / "of the tape")
        fit(again, epochs=1)
        everywhere(hvd, "loaded")
    assert step_report(variables).step == 8
    assert step_report(again.critic.trainable_variables).step == 12


def check_a_checkpoint_of_nothing_warns() -> None:
    with shared_folder(hvd) as folder, logged() as messages:
        model = Gan(hvd.Compression.none)
        fit(model, [hvd_keras.callbacks.StateCheckpoint(folder / "residuals")], epochs=1)
        assert any("no residuals were saved" in message for message in messages)
