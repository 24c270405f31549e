"""Handwritten digits (they come with scikit-learn) with a tf.GradientTape, data-parallel with Horovod and OkTopk.
A tape reduces gradients, and StepAhead needs an optimizer: see minimal_keras.py for StepAhead.

    horovodrun -np 2 -H localhost:2 python examples/minimal_tensorflow.py
"""

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from horovod_oktopk.tensorflow import OkTopk

hvd.init()  # Horovod: start.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # Horovod: pin one GPU to each rank.

images, labels = load_digits(return_X_y=True)
# Horovod: all ranks split the data in the same way.
train_x, test_x, train_y, test_y = train_test_split((images / 16).astype("float32"), labels, random_state=1)
# Horovod: each rank trains on its own part. All parts have the same size.
count = len(train_x) // hvd.size() * hvd.size()
data = tf.data.Dataset.from_tensor_slices((train_x[:count], train_y[:count])).shard(hvd.size(), hvd.rank())

model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(256, activation="relu"),
                             tf.keras.layers.Dense(10)])
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Horovod: scale the learning rate by the number of ranks.
optimizer = tf.keras.optimizers.SGD(0.02 * hvd.size(), momentum=0.9)
optimizer.build(model.trainable_variables)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    # Horovod: wrap the tape. OkTopk: send only the largest 5 % of the gradient. The other examples send 1 %,
    # with StepAhead. Without StepAhead, this small model needs more to be as accurate.
    tape = hvd.DistributedGradientTape(tape, compression=OkTopk(density=0.05))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


# Horovod: all ranks start from the same parameters.
model.set_weights(hvd.broadcast_object(model.get_weights(), root_rank=0))
for epoch in range(10):
    losses = [step(x, y) for x, y in data.shuffle(count, seed=epoch).batch(32)]
    if hvd.rank() == 0:  # Horovod: one rank reports.
        print(f"epoch {epoch + 1}: loss {sum(map(float, losses)) / len(losses):.3f}", flush=True)
accuracy = (model(test_x).numpy().argmax(1) == test_y).mean()
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.1%}")
