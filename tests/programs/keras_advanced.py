"""The shape of Horovod's advanced Keras examples, keras_mnist_advanced.py and keras_imagenet_resnet50.py, on digits.

Warm-up, then steps of the learning rate, then less of it on a plateau; augmented data; a second run goes on from the
last checkpoint. What is not Horovod's own is marked with "OkTopk:".

    horovodrun -np 2 -H localhost:2 python -m tests.programs.keras_advanced FOLDER step-ahead|oktopk EPOCHS
"""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras  # OkTopk: in place of horovod.tensorflow.keras
from benchmarks.data.digits import split_digits
from tests.programs.options import COMPRESSIONS

keras = tf.keras
folder, name, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())
compression = COMPRESSIONS[name]
images, test_images, labels, test_labels = split_digits(1, (8, 8, 1))
batches = len(images) // 32 // hvd.size()
initial_lr = 0.025 * hvd.size()

found = [epoch for epoch in range(epochs, 0, -1) if (folder / f"checkpoint-{epoch}.keras").exists()]
resume_from_epoch = hvd.broadcast_object(found[0] if found else 0, root_rank=0, name="resume_from_epoch")


def make_model() -> object:
    model = keras.Sequential([
        keras.layers.Input((8, 8, 1)),
        keras.layers.RandomTranslation(0.08, 0.08), keras.layers.RandomRotation(0.02),
        keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.MaxPooling2D(2), keras.layers.Dropout(0.25), keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.5), keras.layers.Dense(10)])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(initial_lr, momentum=0.9),
                                               compression=compression)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer,
                  metrics=["accuracy"])
    return model


# OkTopk: all ranks load the file, not rank 0 alone: Keras 3 gives a loaded model's variables other names.
if resume_from_epoch:
    model = hvd_keras.load_model(folder / f"checkpoint-{resume_from_epoch}.keras", compression=compression)
else:
    model = make_model()

callbacks = [
    hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd_keras.callbacks.MetricAverageCallback(),
    hvd_keras.callbacks.LearningRateWarmupCallback(warmup_epochs=2, initial_lr=initial_lr, verbose=1),
    *(hvd_keras.callbacks.LearningRateScheduleCallback(start_epoch=start, end_epoch=end, initial_lr=initial_lr,
                                                       multiplier=lambda epoch, multiplier=multiplier: multiplier)
      for start, end, multiplier in ((2, 4, 1.0), (4, 6, 0.5))),
    keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=10, verbose=1)]
# OkTopk: residuals are saved and restored, too; on all ranks, after the callback that saves the model.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(str(folder / "checkpoint-{epoch}.keras")))
callbacks.append(hvd_keras.callbacks.StateCheckpoint(folder / "residuals.npz"))

mine = np.arange(batches * 32 * hvd.size())[hvd.rank()::hvd.size()]  # the same number of batches on all ranks
history = model.fit(images[mine], labels[mine], batch_size=32, callbacks=callbacks,
                    epochs=epochs, initial_epoch=resume_from_epoch, verbose=2 if hvd.rank() == 0 else 0,
                    validation_data=(test_images, test_labels)).history
score = hvd.allreduce(tf.constant(model.evaluate(test_images, test_labels, verbose=0)))
if hvd.rank() == 0:
    print("learning rates", [f"{rate:.4g}" for rate in history["lr"]])
    print(f"test accuracy {float(score[1]):.1%}")
