"""The shape of Horovod's tensorflow2_keras_mnist.py, on digits: what is not Horovod's own is marked with "OkTopk:".

    horovodrun -np 2 -H localhost:2 python -m tests.programs.keras_mnist FOLDER step-ahead|oktopk
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras  # OkTopk: in place of horovod.tensorflow.keras
from benchmarks.data.digits import split_digits
from tests.programs.options import COMPRESSIONS

folder, compression = sys.argv[1:]
hvd.init()
tf.keras.utils.set_random_seed(1 + hvd.rank())
images, test_images, labels, test_labels = split_digits(1, (8, 8, 1))
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(2000).batch(32)

model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
    tf.keras.layers.Conv2D(32, [3, 3], activation="relu"),
    tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
    tf.keras.layers.Dropout(0.25),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(64, activation="relu"),
    tf.keras.layers.Dropout(0.5),
    tf.keras.layers.Dense(10, activation="softmax")])
scaled_lr = 0.001 * hvd.size()
optimizer = tf.keras.optimizers.Adam(scaled_lr)
optimizer = hvd_keras.DistributedOptimizer(
    optimizer, backward_passes_per_step=1, average_aggregated_gradients=True,
    compression=COMPRESSIONS[compression])  # OkTopk: the compression
# OkTopk: without experimental_run_tf_function, which Keras 3 does not take.
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])

callbacks = [
    hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd_keras.callbacks.MetricAverageCallback(),
    hvd_keras.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1)]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(f"{folder}/checkpoint-{{epoch}}.h5"))
model.fit(dataset, steps_per_epoch=100 // hvd.size(), callbacks=callbacks, epochs=6,
          verbose=2 if hvd.rank() == 0 else 0)

accuracy = model.evaluate(test_images, test_labels, verbose=0)[1]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.1%}")
