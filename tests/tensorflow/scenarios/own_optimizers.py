"""Keras models with a training step of their own: one that is never called as a whole, a GAN with two optimizers."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import AgreementError
from horovod_oktopk.tensorflow.versions import KERAS_3
from tests.scenarios.common import DENSE, assert_equal_everywhere, raised_everywhere
from tests.tensorflow.scenarios.common import distribute, fit, keras, weights

layers = keras.layers


def minimize(optimizer: Any, loss: Any, trained: list[Any], tape: Any) -> None:
    """A step; tf-keras reduces in `minimize` alone, which Keras 3 does not have."""
    variables = [variable for layer in trained for variable in layer.trainable_variables]
    if KERAS_3:
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    else:
        optimizer.minimize(loss, variables, tape)


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
        self.others = {"criticises": distribute(compression, keras.optimizers.SGD(rate, momentum=0.5))}
        self.compile()

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(x[:, :6])
            loss = tf.reduce_mean(tf.square(self.critic(made) - 1.0))
            of_critic = tf.reduce_mean(tf.square(self.critic(x) - 1.0) + tf.square(self.critic(made)))
        minimize(self.others["criticises"], of_critic, [self.critic], tape)
        minimize(self.generates, loss, [self.generator], tape)
        return {"loss": loss}


def state(optimizer: Any) -> dict[str, np.ndarray]:
    variables = optimizer.variables if KERAS_3 else optimizer.variables()
    return {f"{index:03}": np.asarray(variable) for index, variable in enumerate(variables)}


def broadcast() -> Any:
    return hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)


def check_a_model_that_is_never_called_starts_alike() -> None:
    keras.utils.set_random_seed(1 + hvd.rank())
    model = Autoencoder()
    model.compile(distribute(DENSE))
    fit(model, [broadcast()])
    assert len(weights(model)) == 4
    assert_equal_everywhere(hvd, weights(model))


def check_a_gan_starts_alike_with_the_state_of_its_own_optimizers() -> None:
    if not KERAS_3:  # Horovod's own callback knows model.optimizer alone
        return
    keras.utils.set_random_seed(1 + hvd.rank())
    model = Gan(DENSE, rate=0.05 * (1 + hvd.rank()))
    fit(model, [broadcast()])
    assert len(weights(model)) == 4
    assert_equal_everywhere(hvd, weights(model))
    for optimizer in (model.generates, model.others["criticises"]):
        assert_equal_everywhere(hvd, state(optimizer))


def check_ranks_with_other_variables_all_raise() -> None:
    if not KERAS_3 or hvd.size() == 1:
        return
    model = Gan(hvd.Compression.none)
    if hvd.rank() == 0:
        model.average = layers.Dense(3, name="average")
        model.average.build((None, 2))
    message = raised_everywhere(hvd, AgreementError, lambda: fit(model, [broadcast()]))[0]
    assert "rank 0: float32 of shape (2, 3)" in message


def check_what_one_rank_has_restored_is_taken_after_the_first_batch() -> None:
    """Its variables have other names then."""
    if not KERAS_3:
        return
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
