"""Keras 3: the callbacks of horovod.tensorflow.keras that a training script needs."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np

import tensorflow as tf

from ...errors import OptionError
from ..registry import tensor_of

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """All ranks take the root's weights and optimizer state when training begins; random seeds stay their own."""

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank = root_rank

    def on_train_begin(self, logs: Logs = None) -> None:
        self._done = False
        if self.model.built and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._broadcast()  # of a model that was built in the first batch only

    def _broadcast(self) -> None:
        if self._done or not (self.model.built and self.model.optimizer.built):
            return
        variables = [tensor_of(v) for v in (*self.model.weights, *self.model.optimizer.variables)]
        hvd.broadcast_variables(variables, root_rank=self._root_rank)
        self._done = True


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages an epoch's metrics over the ranks. Comes before the callbacks that are to see the mean."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs:
            names = sorted(logs)
            values = np.array([float(logs[name]) for name in names])
            means = hvd.allreduce(tf.constant(values), op=hvd.Average, name="horovod_oktopk.metrics").numpy()
            logs |= dict(zip(names, means.tolist(), strict=True))


class LearningRateWarmupCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate from initial_lr / P to initial_lr over the first epochs, batch by batch.

    As Horovod's, after Goyal et al. (2017). momentum_correction: not in Keras 3, where momentum is a constant.
    """

    def __init__(self, initial_lr: float, warmup_epochs: float = 5, momentum_correction: bool = False,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        super().__init__()
        if momentum_correction:
            raise OptionError("momentum_correction=True is not possible in Keras 3, where the momentum is a constant")
        self._initial_lr, self._warmup_epochs, self._verbose = initial_lr, warmup_epochs, verbose
        self._steps = steps_per_epoch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch
        self._steps = self._steps or self.params.get("steps")
        if not self._steps:
            raise OptionError("the number of steps in an epoch is not known: give steps_per_epoch")

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._epoch < self._warmup_epochs:
            assert self._steps is not None
            done = self._epoch + (batch + 1) / self._steps
            share = (1 + (hvd.size() - 1) * min(1.0, done / self._warmup_epochs)) / hvd.size()
            self.model.optimizer.learning_rate = self._initial_lr * share

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        rate = float(np.asarray(self.model.optimizer.learning_rate))
        if logs is not None:
            logs["lr"] = rate
        if self._verbose and hvd.rank() == 0 and self._warmup_epochs - 1 <= epoch < self._warmup_epochs:
            tf.print(f"\nEpoch {epoch + 1}: the learning rate has reached {rate:g}.")
