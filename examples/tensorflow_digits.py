"""Handwritten digits with a convolutional network and a tf.GradientTape, data-parallel with Horovod.

    horovodrun -np 4 -H localhost:4 python examples/tensorflow_digits.py --compression oktopk

The same script runs under Keras 3 and, with TF_USE_LEGACY_KERAS=1, under tf-keras. For `model.fit`, see
keras_digits.py. The data (1,797 images of 8 x 8 pixels) come with scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
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

from horovod_oktopk.schemes.cost import dense_volume
from horovod_oktopk.tensorflow import OkTopk, step_report

WARM_UP_STEPS = 5
"""Not timed."""


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


def load_data(seed: int, batch_size: int) -> tuple[tf.data.Dataset, tuple[Any, Any]]:
    """Batches of this rank's part of the training set, and the whole test set."""
    images, labels = load_digits(return_X_y=True)
    images = ((images - images.mean()) / images.std()).astype(np.float32).reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels,
                                                        random_state=seed)
    # Horovod: all ranks shuffle alike, anew in every epoch, and each takes its own part, of the same size as others'.
    training = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shuffle(len(train_x), seed=seed)
    training = training.take(len(train_x) // hvd.size() * hvd.size()).shard(hvd.size(), hvd.rank())
    return training.batch(batch_size), (test_x, test_y)


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


def variables_of(variables: Iterable[Any]) -> list[tf.Variable]:
    """The variables as Horovod wants them: one of Keras 3 holds a tf.Variable, one of tf-keras is a tf.Variable."""
    return [v if isinstance(v, tf.Variable) else v.value for v in variables]


def make_step(model: keras.Model, optimizer: Any, compression: Any, signature: Any) -> Callable[..., tf.Tensor]:
    """A function that takes one step with images and labels, and returns the loss. signature: of these two."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = variables_of(model.trainable_variables)

    @tf.function(input_signature=signature)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # Horovod: wrap the tape; this is where the compression goes.
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def accuracy(model: keras.Model, images: Any, labels: Any) -> float:
    return float(np.mean(np.argmax(model(images, training=False), axis=1) == labels))


class Statistics:
    """Seconds and bytes by step, on this rank."""

    def __init__(self, weights: list[tf.Variable], writer: Any) -> None:
        self.seconds: list[float] = []
        self.bytes_sent: list[float] = []
        self._weights = weights
        self._dense = 4 * dense_volume(sum(int(np.prod(w.shape)) for w in weights), hvd.size())
        self._writer = writer

    def step(self, seconds: float, compressed: bool) -> None:
        self.seconds.append(seconds)
        report = step_report(self._weights) if compressed else None
        self.bytes_sent.append(self._dense if report is None else report.bytes_sent)
        if report is not None and self._writer is not None:
            with self._writer.as_default(report.step):
                for name, value in report.scalars().items():
                    tf.summary.scalar(f"oktopk/{name}", float(value))

    def summary(self) -> dict[str, float]:
        """Over all ranks."""
        means = hvd.allgather_object(statistics.fmean(self.bytes_sent))
        return {"bytes_per_step": statistics.fmean(means),
                "seconds_per_step": statistics.median(self.seconds[WARM_UP_STEPS:])}


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    training, test = load_data(arguments.seed, arguments.batch_size)
    model = make_model(arguments.seed)

    # Horovod: scale the learning rate by the number of ranks.
    rate = arguments.lr * hvd.size()
    optimizer = keras.optimizers.SGD(rate, momentum=arguments.momentum)
    compressed = arguments.compression == "oktopk"
    step = make_step(model, optimizer, OkTopk(density=arguments.density) if compressed else hvd.Compression.none,
                     training.element_spec)

    losses: list[float] = []  # of the last batch of every epoch, on rank 0
    seen = Statistics(variables_of(model.trainable_variables), make_writer(arguments.tensorboard))
    # Horovod: only rank 0 shows a progress bar.
    with tqdm(total=arguments.epochs * len(training), desc=f"{arguments.compression:>6}", unit="step",
              disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for epoch in range(arguments.epochs):
            optimizer.learning_rate = rate / 2 * (1 + math.cos(math.pi * epoch / arguments.epochs))
            for images, labels in training:
                start = time.perf_counter()
                loss = step(images, labels)
                if not seen.seconds:
                    # Horovod: all ranks go on from the parameters and optimizer state that rank 0 has after a step.
                    hvd.broadcast_variables(variables_of([*model.weights, *optimizer.variables]), root_rank=0)
                seen.step(time.perf_counter() - start, compressed)
                progress.update()
            losses.append(float(loss))
            progress.set_postfix(epoch=epoch + 1, loss=f"{losses[-1]:.3f}")
    # Horovod: average the loss of the last batches over the ranks.
    last_loss = float(hvd.allreduce(loss, name="loss"))
    return {"compression": arguments.compression, "density": arguments.density, "ranks": hvd.size(),
            "parameters": model.count_params(), "accuracy": accuracy(model, *test),
            "loss": last_loss, "losses": losses,
            "bytes_are": "counted as sent" if compressed else "computed: 2n(P-1)/P words of 4 bytes",
            **seen.summary()}


def make_writer(folder: Path | None) -> Any:
    return tf.summary.create_file_writer(str(folder)) if folder is not None and hvd.rank() == 0 else None


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
