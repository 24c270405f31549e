"""Names that fragments of TensorFlow and Keras use: a model, an optimizer, and data."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras


def prepare(code: str, path: str) -> dict[str, Any]:
    """Return the names. If the fragment distributes nothing itself, the model has trained with OkTopk."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(8), tf.keras.layers.Dense(1)])
    x = np.random.default_rng(hvd.rank()).normal(size=(16, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    optimizer = tf.keras.optimizers.SGD(0.01)
    if "Distributed" not in code:
        optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=hvd_keras.OkTopk(density=0.5))
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(data, verbose=0)
    return {"hvd": hvd, "tf": tf, "keras": tf.keras, "hvd_keras": hvd_keras, "model": model, "optimizer": optimizer,
            "x": x, "y": y, "data": data, "loss": "mse", "loss_of": tf.keras.losses.MeanSquaredError(), "epochs": 2,
            "path": path, "tape": tf.GradientTape()}


def finish(names: dict[str, Any]) -> None:
    """Train with what a fragment has made."""
    if getattr(names["model"], "optimizer", None) is not None:
        names["model"].fit(names["data"], verbose=0, callbacks=[
            hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
