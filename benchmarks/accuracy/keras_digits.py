"""Handwritten digits with a convolutional network and Keras' `model.fit`, data-parallel with Horovod.

    horovodrun -np 4 -H localhost:4 python -m benchmarks.accuracy.keras_digits --compression oktopk

The same program runs under Keras 3 and, with TF_USE_LEGACY_KERAS=1, under tf-keras.
"""
# ruff: noqa: ARG002  (Keras passes callbacks' arguments by name)

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow import keras
from tqdm import tqdm

import horovod_oktopk.tensorflow.keras as hvd_keras
from benchmarks.accuracy.training import Results, Statistics, finish, make_parser
from benchmarks.data.digits import split_digits

Logs = dict[str, Any] | None


def load_data(seed: int, batch_size: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return batches of this rank's part of the training set, and of the whole test set."""
    train_x, test_x, train_y, test_y = split_digits(seed, (8, 8, 1))
    # All ranks shuffle alike, anew in every epoch, and each takes its own part, of the same size as others'.
    training = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shuffle(len(train_x), seed=seed)
    training = training.take(len(train_x) // hvd.size() * hvd.size()).shard(hvd.size(), hvd.rank())
    test = tf.data.Dataset.from_tensor_slices((test_x, test_y))
    return training.batch(batch_size), test.batch(len(test_x))


def make_model(seed: int) -> keras.Model:
    layers = keras.layers
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(128, activation="relu"),
        # Every rank has dropout masks of its own.
        layers.Dropout(0.5, seed=seed * hvd.size() + hvd.rank()), layers.Dense(10)])


class StepStatistics(keras.callbacks.Callback):
    """Statistics of the steps. The seconds include what Keras itself spends on a step."""

    def on_train_begin(self, logs: Logs = None) -> None:
        self.statistics = Statistics(hvd, self.model.count_params())

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        seconds = time.perf_counter() - self._start
        self.statistics.step(seconds, hvd_keras.step_report(self.model))  # None without OkTopk


class ProgressBar(keras.callbacks.Callback):
    """One bar for all epochs."""

    def __init__(self, description: str) -> None:
        super().__init__()
        self._description = description

    def on_train_begin(self, logs: Logs = None) -> None:
        self._bar = tqdm(total=self.params["epochs"] * self.params["steps"], desc=self._description, unit="step",
                         mininterval=0.5)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._bar.update()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        assert logs is not None
        self._bar.set_postfix(epoch=epoch + 1, loss=f"{logs['loss']:.3f}")

    def on_train_end(self, logs: Logs = None) -> None:
        self._bar.close()


def compression_of(arguments: argparse.Namespace) -> Any:
    if arguments.compression == "none":
        return hvd.Compression.none
    scheme = hvd_keras.OkTopk(density=arguments.density)
    return hvd_keras.StepAhead(scheme) if arguments.step_ahead else scheme


def train(arguments: argparse.Namespace) -> Results:
    training, test = load_data(arguments.seed, arguments.batch_size)
    model = make_model(arguments.seed)
    compressed = arguments.compression == "oktopk"
    rate = arguments.lr * hvd.size()
    optimizer = (keras.optimizers.Adam(rate) if arguments.optimizer == "adam" else
                 keras.optimizers.SGD(rate, momentum=arguments.momentum))
    model.compile(
        hvd_keras.DistributedOptimizer(optimizer, compression=compression_of(arguments)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    def cosine(epoch: int, _: float) -> float:
        return rate / 2 * (1 + math.cos(math.pi * epoch / arguments.epochs))

    seen = StepStatistics()
    callbacks = [seen, keras.callbacks.LearningRateScheduler(cosine),
                 hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
                 *([hvd_keras.callbacks.StepReportLogger()] if compressed else []),
                 hvd_keras.callbacks.MetricAverageCallback(),
                 *([ProgressBar(f"{arguments.compression:>6}")] if hvd.rank() == 0 else [])]
    # The data set itself shuffles.
    history = model.fit(training, epochs=arguments.epochs, shuffle=False, callbacks=callbacks, verbose=0).history
    return {"accuracy": float(model.evaluate(test, verbose=0)[1]), "losses": list(map(float, history["loss"])),
            **seen.statistics.summary(arguments)}


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, ["oktopk"], epochs=30, batch_size=32, lr=0.0125)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--step-ahead", action="store_true", help="StepAhead around the scheme")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    hvd.init()
    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[hvd.local_rank():][:1], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    results = train(arguments)
    if hvd.rank() == 0:
        finish(results, f"test accuracy {results['accuracy']:.2%}", arguments.json)


if __name__ == "__main__":
    main()
