"""tf-keras: Horovod's own callbacks, with the Keras that is in use."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.keras as stock
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback, LearningRateWarmupCallback

from horovod_oktopk.tensorflow.meeting import check_alike, meet

__all__ = ["BroadcastGlobalVariablesCallback", "LearningRateWarmupCallback", "MetricAverageCallback"]

# Horovod imports `keras.backend`, which is Keras 3's even where tf.keras is tf-keras.
stock.K = stock.callbacks.K = tf.keras.backend


class MetricAverageCallback(stock.callbacks.MetricAverageCallback):  # type: ignore[misc]
    """Averages an epoch's metrics over the ranks. It comes before the callbacks that are to see the mean.

    Raises:
        AgreementError: On all ranks, at the end of an epoch: some have more batches, or other metrics.

    Examples:
        >>> hvd_keras.callbacks.MetricAverageCallback()
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        meet(self.model, "average the metrics of an epoch")
        check_alike("metrics", sorted(logs or {}))
        super().on_epoch_end(epoch, logs)
