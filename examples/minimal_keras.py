"""Handwritten digits (they come with scikit-learn) with Keras' model.fit, data-parallel with Horovod and StepAhead.

    horovodrun -np 2 -H localhost:2 python examples/minimal_keras.py
"""

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras

import horovod_oktopk.tensorflow.keras as hvd_keras

hvd.init()  # Horovod: start.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # Horovod: pin one GPU to each rank.

images, labels = load_digits(return_X_y=True)
# Horovod: all ranks split the data in the same way.
train_x, test_x, train_y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=1)
# Horovod: each rank trains on its own part. All parts have the same size.
count = len(train_x) // hvd.size()
mine = slice(hvd.rank() * count, (hvd.rank() + 1) * count)

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
# Horovod: scale the learning rate by the number of ranks.
optimizer = keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
# Horovod: wrap the optimizer. StepAhead: send the largest 1 % of what the optimizer did to the parameters.
compression = hvd_keras.StepAhead(hvd_keras.OkTopk(density=0.01))
optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compression)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

model.fit(train_x[mine], train_y[mine], batch_size=32, epochs=10,
          verbose=2 if hvd.rank() == 0 else 0,  # Horovod: one rank reports.
          callbacks=[
              # Horovod: all ranks start from the same parameters and optimizer state.
              # StepAhead: after each epoch, and after fit, the model has the parameters that all ranks share.
              hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
              # Horovod: average the metrics over the ranks.
              hvd_keras.callbacks.MetricAverageCallback()])

accuracy = model.evaluate(test_x, test_y, verbose=0)[1]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.1%}")
