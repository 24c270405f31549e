"""Handwritten digits with a convolutional network and Keras' `model.fit`, data-parallel with Horovod.

    horovodrun -np 4 -H localhost:4 python -m benchmarks.accuracy.keras_digits --compression oktopk

The same script runs under Keras 3 and, with TF_USE_LEGACY_KERAS=1, under tf-keras. The data (1,797 images of
8 x 8 pixels) come with scikit-learn.
"""
# ruff: noqa: ARG002  (Keras passes callbacks' arguments by name)

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras
from tqdm import tqdm

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk.schemes.cost import dense_volume

WARM_UP_STEPS = 5
"""Not timed."""
Logs = dict[str, Any] | None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", choices=["none", "oktopk"], default="oktopk")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of the gradient that is sent")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.0125, help="per rank: it is multiplied by the number of ranks")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="rank 0 writes the results here")
    parser.add_argument("--tensorboard", type=Path, help="rank 0 writes what every step did here")
    return parser.parse_args()


def load_data(seed: int, batch_size: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Batches of this rank's part of the training set, and of the whole test set."""
    images, labels = load_digits(return_X_y=True)
    images = ((images - images.mean()) / images.std()).astype(np.float32).reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels,
                                                        random_state=seed)
    # Horovod: all ranks shuffle alike, anew in every epoch, and each takes its own part, of the same size as others'.
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
        # Horovod: every rank has dropout masks of its own.
        layers.Dropout(0.5, seed=seed * hvd.size() + hvd.rank()), layers.Dense(10)])


class Statistics(keras.callbacks.Callback):
    """Seconds and bytes by step, on this rank. The seconds include what Keras itself spends on a step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.bytes_sent: list[float] = []

    def on_train_begin(self, logs: Logs = None) -> None:
        self._dense = 4 * dense_volume(self.model.count_params(), hvd.size())

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        report = hvd_keras.step_report(self.model)  # None without OkTopk
        self.bytes_sent.append(self._dense if report is None else report.bytes_sent)

    def summary(self) -> dict[str, float]:
        """Over all ranks."""
        means = hvd.allgather_object(statistics.fmean(self.bytes_sent))
        return {"bytes_per_step": statistics.fmean(means),
                "seconds_per_step": statistics.median(self.seconds[WARM_UP_STEPS:])}


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


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    training, test = load_data(arguments.seed, arguments.batch_size)
    model = make_model(arguments.seed)

    # Horovod: scale the learning rate by the number of ranks.
    rate = arguments.lr * hvd.size()
    optimizer = keras.optimizers.SGD(rate, momentum=arguments.momentum)
    compressed = arguments.compression == "oktopk"
    # Horovod: wrap the optimizer; this is where the compression goes.
    optimizer = hvd_keras.DistributedOptimizer(
        optimizer, compression=hvd_keras.OkTopk(density=arguments.density) if compressed else hvd.Compression.none)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    schedule = keras.callbacks.LearningRateScheduler(
        lambda epoch, _: rate / 2 * (1 + math.cos(math.pi * epoch / arguments.epochs)))
    seen = Statistics()
    callbacks = [
        seen, schedule,
        # Horovod: all ranks start from the same parameters and optimizer state.
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        *([hvd_keras.callbacks.StepReportLogger()] if compressed else []),
        # Horovod: average the metrics over the ranks, for the callbacks that follow.
        hvd_keras.callbacks.MetricAverageCallback()]
    # Horovod: only rank 0 shows a progress bar and writes logs.
    if hvd.rank() == 0:
        callbacks.append(ProgressBar(f"{arguments.compression:>6}"))
        if arguments.tensorboard is not None:
            callbacks.append(keras.callbacks.TensorBoard(arguments.tensorboard, write_graph=False, update_freq=1))
    # The data set itself shuffles.
    history = model.fit(training, epochs=arguments.epochs, shuffle=False, callbacks=callbacks, verbose=0).history
    losses = [float(loss) for loss in history["loss"]]  # means of the epochs, over all ranks
    return {"compression": arguments.compression, "density": arguments.density, "ranks": hvd.size(),
            "parameters": model.count_params(), "accuracy": float(model.evaluate(test, verbose=0)[1]),
            "loss": losses[-1], "losses": losses,
            "bytes_are": "counted as sent" if compressed else "computed: 2n(P-1)/P words of 4 bytes",
            **seen.summary()}


def main() -> None:
    arguments = parse_arguments()
    hvd.init()  # Horovod: start.
    # Horovod: each rank takes a GPU of its own, if there is one for it.
    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[hvd.local_rank():][:1], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    results = train(arguments)
    if hvd.rank() == 0:
        print(f"test accuracy {results['accuracy']:.2%}, {results['bytes_per_step']:,.0f} bytes sent by each rank in "
              f"a step, {1e3 * results['seconds_per_step']:.1f} ms a step")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
