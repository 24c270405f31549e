"""One rank of a job that trains TensorFlow's DCGAN: two models, whose steps are taken in one `tf.function`.

It prints one line, with a digest of what all ranks share at the end.
"""

from __future__ import annotations

import hashlib
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk.tensorflow import OkTopk, StepAhead, shared_parameters

keras, layers = tf.keras, tf.keras.layers
BATCH, NOISE, STEPS = 16, 20, 10


def make_generator() -> Any:
    return keras.Sequential([
        keras.Input((NOISE,)), layers.Dense(7 * 7 * 16, use_bias=False), layers.BatchNormalization(),
        layers.LeakyReLU(), layers.Reshape((7, 7, 16)),
        layers.Conv2DTranspose(8, 5, padding="same", use_bias=False), layers.BatchNormalization(), layers.LeakyReLU(),
        layers.Conv2DTranspose(4, 5, strides=2, padding="same", use_bias=False), layers.BatchNormalization(),
        layers.LeakyReLU(), layers.Conv2DTranspose(1, 5, strides=2, padding="same", use_bias=False,
                                                   activation="tanh")])


def make_discriminator() -> Any:
    return keras.Sequential([
        keras.Input((28, 28, 1)), layers.Conv2D(4, 5, strides=2, padding="same"), layers.LeakyReLU(),
        layers.Dropout(0.3), layers.Conv2D(8, 5, strides=2, padding="same"), layers.LeakyReLU(), layers.Dropout(0.3),
        layers.Flatten(), layers.Dense(1)])


def make_optimizer() -> Any:
    return hvd_keras.DistributedOptimizer(keras.optimizers.Adam(1e-4), compression=StepAhead(OkTopk(density=0.01)))


def digest_of(*models: Any) -> str:
    """Of all trained weights; BatchNormalization's moving averages are each rank's own."""
    found = hashlib.sha256()
    for model in models:
        for weight in model.trainable_variables:
            found.update(np.asarray(weight).tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    hvd.init()
    tf.random.set_seed(hvd.rank())
    generator, discriminator = make_generator(), make_discriminator()
    of_generator, of_discriminator = make_optimizer(), make_optimizer()
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    for weight in (*generator.weights, *discriminator.weights):  # of either Keras
        weight.assign(hvd.broadcast(np.asarray(weight), root_rank=0))

    @tf.function
    def train_step(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        noise = tf.random.normal((BATCH, NOISE))
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            made = generator(noise, training=True)
            real, fake = discriminator(images, training=True), discriminator(made, training=True)
            gen_loss = cross_entropy(tf.ones_like(fake), fake)
            disc_loss = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)
        gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
        disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        of_generator.apply_gradients(zip(gen_gradients, generator.trainable_variables, strict=True))
        of_discriminator.apply_gradients(zip(disc_gradients, discriminator.trainable_variables, strict=True))
        return gen_loss, disc_loss

    for _ in range(STEPS):
        losses = train_step(tf.random.uniform((BATCH, 28, 28, 1), -1, 1))
    with shared_parameters(of_generator), shared_parameters(of_discriminator):
        shared = digest_of(generator, discriminator)
    finite = all(map(np.isfinite, losses))
    print(f"rank {hvd.rank()} shares {shared}; its losses are {'finite' if finite else 'not finite'}", flush=True)


if __name__ == "__main__":
    main()
