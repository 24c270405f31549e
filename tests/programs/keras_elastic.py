"""The shape of Horovod's tensorflow2_keras_mnist_elastic.py, on digits: "OkTopk:" marks what is not Horovod's own.

    horovodrun --gloo -np 2 --min-np 2 --max-np 3 --host-discovery-script SCRIPT \
        python -m tests.programs.keras_elastic FOLDER step-ahead|oktopk

For the test, a file `joined` in the folder asks for a third worker, and `outcome.json` says what came of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras  # OkTopk: in place of horovod.tensorflow.keras
from benchmarks.data.digits import split_digits
from tests.programs.options import COMPRESSIONS

EPOCHS, STEPS = 6, 60
folder, compression = Path(sys.argv[1]), sys.argv[2]
hvd.init()
images, test_images, labels, test_labels = split_digits(1, (8, 8, 1))
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(2000).batch(32)
model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
    tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
    tf.keras.layers.Dropout(0.25),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(64, activation="relu"),
    tf.keras.layers.Dense(10, activation="softmax")])
optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())
optimizer = hvd_keras.DistributedOptimizer(
    optimizer, backward_passes_per_step=1, average_aggregated_gradients=True,
    compression=COMPRESSIONS[compression])  # OkTopk: the compression
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])
# OkTopk: the model is built, in place of a fit of one step: KerasState makes the optimizer's variables. So ranks that
# join need no such step beside the others', in the reset callback.
model.build((None, 8, 8, 1))
state = hvd_keras.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset() -> None:
    state.model.optimizer.learning_rate = 0.001 * hvd.size()


state.register_reset_callbacks([on_state_reset])


class Newcomer(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Asks for a third worker after the second epoch, and waits for it."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if state.epoch == 2 and hvd.size() == 2:
            (folder / "joined").touch()
            while True:  # until a commit finds that the hosts have changed, on all ranks together
                time.sleep(0.1)
                state.commit()


callbacks = [
    # OkTopk: with StepAhead Keras sees what all ranks share at the end of an epoch.
    hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd_keras.elastic.UpdateEpochStateCallback(state),
    hvd_keras.elastic.UpdateBatchStateCallback(state),
    hvd_keras.elastic.CommitStateCallback(state),
    Newcomer()]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(str(folder / "checkpoint-{epoch}.h5")))


@hvd_keras.elastic.run
def train(state: Any) -> None:
    state.model.fit(dataset, steps_per_epoch=STEPS // hvd.size(), epochs=EPOCHS - state.epoch, callbacks=callbacks,
                    verbose=0)


train(state)
flat = np.concatenate([value.ravel() for value in model.get_weights()])
everyone = hvd.allgather_object({"size": hvd.size(), "epoch": state.epoch, "batch": state.batch,
                                 "rate": float(np.asarray(model.optimizer.learning_rate)),
                                 "iterations": int(np.asarray(model.optimizer.iterations)),
                                 "weights": flat.tolist()})
accuracy = float(model.evaluate(test_images, test_labels, verbose=0)[1])
if hvd.rank() == 0:
    (folder / "outcome.json").write_text(json.dumps({"ranks": everyone, "accuracy": accuracy}))
