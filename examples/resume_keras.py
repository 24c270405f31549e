"""Handwritten digits with Keras and StepAhead, saved after each epoch. A second run continues from there:

    horovodrun -np 2 -H localhost:2 python examples/resume_keras.py --epochs 5
    horovodrun -np 2 -H localhost:2 python examples/resume_keras.py --epochs 10
"""

import argparse
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras

import horovod_oktopk.tensorflow.keras as hvd_keras

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10, help="train until this epoch (10)")
parser.add_argument("--folder", type=Path, default="runs/resume_keras", help="the folder of the checkpoint")
arguments = parser.parse_args()

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # Horovod: pin one GPU to each rank.

images, labels = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=1)
count = len(train_x) // hvd.size()  # Horovod: each rank trains on its own part. All parts have the same size.
mine = slice(hvd.rank() * count, (hvd.rank() + 1) * count)

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9),
                                           compression=hvd_keras.StepAhead(hvd_keras.OkTopk(density=0.01)))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

# The order matters. The first callback gives the model the parameters that all ranks share, and the second one saves
# them. Each rank saves and restores on its own disk, together with its epoch and its optimizer state. The third
# callback saves what each rank has not sent yet: one file for all ranks, on the disk of rank 0.
callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
             keras.callbacks.BackupAndRestore(str(arguments.folder / f"rank-{hvd.rank()}"), delete_checkpoint=False),
             hvd_keras.callbacks.StateCheckpoint(arguments.folder / "residuals.npz")]
model.fit(train_x[mine], train_y[mine], batch_size=32, epochs=arguments.epochs, callbacks=callbacks,
          verbose=2 if hvd.rank() == 0 else 0)

accuracy = model.evaluate(test_x, test_y, verbose=0)[1]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.1%} after epoch {arguments.epochs}")
