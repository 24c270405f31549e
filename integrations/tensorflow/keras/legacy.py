"""tf-keras: Horovod's own callbacks, with the Keras that is in use."""

from __future__ import annotations

import horovod.tensorflow.keras as stock
from horovod.tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

import tensorflow as tf

__all__ = ["BroadcastGlobalVariablesCallback", "LearningRateWarmupCallback", "MetricAverageCallback"]

# Horovod imports `keras.backend`, which is Keras 3's even where tf.keras is tf-keras.
stock.K = stock.callbacks.K = tf.keras.backend
