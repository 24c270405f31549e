"""The callbacks of horovod.tensorflow.keras that a training script needs, for either Keras."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain, zip_longest
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk.errors import AgreementError, OptionError
from horovod_oktopk.modes.api import shared_parameters, synchronize_replicas
from horovod_oktopk.tensorflow.optimizer import steps_of
from horovod_oktopk.tensorflow.registry import all_runs_of, each_run_of
from horovod_oktopk.tensorflow.shared import check_alike, meet, resume, suspend
from horovod_oktopk.tensorflow.variables import optimizers_of, tensor_of, variables_in

logger = logging.getLogger("horovod_oktopk")
Logs = dict[str, Any] | None


PLAIN = ("the model's optimizer is not distributed: its gradients stay each rank's own. Give model.compile what "
         "hvd_keras.DistributedOptimizer(optimizer, compression=...) returns")


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """All ranks start from the root's weights and optimizer state; random seeds stay their own. First in the list.

    The model is the same on all ranks whenever Keras looks at it: in validation and prediction, for the callbacks at
    the end of an epoch, and after `fit`. With `StepAhead` it holds each rank's own parameters in between, and with
    `Partial` replicas may differ by some rounds.

    Weights are taken of the model, and of all optimizers that it has, a GAN's own ones too. Variables that are made
    by the first batch are taken after it, and those that come later, with a warning, at the end of their epoch. XLA,
    which cannot compile a collective, is switched off for the model.

    Args:
        root_rank: the rank whose values all take.

    Raises:
        AgreementError: On all ranks, if they have different variables; or, at the end of an epoch, different numbers
            of batches.

    Examples:
        >>> hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._between, self._looking = ExitStack(), ExitStack()
        self._fits = False

    def set_model(self, model: Any) -> None:
        """Take the model, before its training step is made."""
        super().set_model(model)
        model.jit_compile = False

    def on_train_begin(self, logs: Logs = None) -> None:
        self._sent: set[Any] = set()
        self._is_first_batch = self._fits = True
        self._leave()
        suspend(self.model)
        for runs in all_runs_of(self.model):
            runs.adopts = True
        optimizer = self.model.optimizer
        if self.model.built and steps_of(optimizer) and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)
        self._broadcast(must_agree=False)  # what only some ranks have restored waits for the others' first batch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._leave()
        resume(self.model)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_first_batch:
            self._is_first_batch = False
            self._broadcast()
            if not each_run_of(self.model) and not any(map(_is_distributed, optimizers_of(self.model))):
                logger.warning(PLAIN)

    def on_test_begin(self, logs: Logs = None) -> None:
        if self._fits:
            self._synchronize("validation")
        self.on_predict_begin()

    def on_predict_begin(self, logs: Logs = None) -> None:
        self._looking.enter_context(shared_parameters(self.model))

    def on_test_end(self, logs: Logs = None) -> None:
        self._looking.close()

    on_predict_end = on_test_end

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._synchronize("the end of an epoch")
        meet(self.model, "broadcast variables at the end of an epoch")
        late = [variable.name for variable in self._broadcast()]
        if late:
            logger.warning("%d variables were made after the first batch (%s): the ranks had their own until the end "
                           "of epoch %d, and have those of rank %d now. Build the model before fit", len(late),
                           ", ".join(late[:4]), epoch + 1, self._root_rank)
        self._between.enter_context(shared_parameters(self.model))

    def on_train_end(self, logs: Logs = None) -> None:
        self._fits = False
        self._leave()
        suspend(self.model)

    def _synchronize(self, doing: str) -> None:
        """Make replicas equal, with Partial; then all ranks must have come for the same."""
        if any(runs.kind.has_rounds for runs in all_runs_of(self.model)):
            synchronize_replicas(self.model)
            check_alike("places in fit", [doing])

    def _leave(self) -> None:
        self._looking.close()
        self._between.close()

    def _broadcast(self, must_agree: bool = True) -> list[Any]:
        """Broadcast what has not been yet, owner by owner, and return it; all ranks send the same."""
        fresh = self._not_sent()
        theirs = hvd.allgather_object([list(map(_described, each)) for each in fresh],
                                      name="horovod_oktopk.broadcast")
        alike = [all(each == of_owner[0] for each in of_owner) for of_owner in zip_longest(*theirs)]
        if must_agree and not all(alike):
            raise AgreementError(_difference(theirs))
        variables = [v for each, agreed in zip(fresh, alike, strict=False) if agreed for v in each]
        if variables:
            synchronize_replicas(self.model)  # with Partial, some may have seen more rounds than others
            _broadcast_by_position(variables, self._root_rank)
            self._sent.update(v.ref() for v in variables)
        return variables

    def _not_sent(self) -> list[list[Any]]:
        """Return what has not been broadcast, and is no rank's own: of the model, and of each optimizer."""
        owners = [variables_in(self.model, "weights"), *map(variables_in, optimizers_of(self.model))]
        known = self._sent | {v.ref() for run in each_run_of(self.model) for v in run.own_variables}
        fresh: list[list[Any]] = []
        for variables in owners:
            fresh.append([v for v in map(tensor_of, variables) if v.ref() not in known])
            known.update(v.ref() for v in fresh[-1])
        return fresh


def _is_distributed(optimizer: Any) -> bool:
    return steps_of(optimizer) is not None or hasattr(optimizer, "_allreduce_grads")  # stock Horovod's


def _broadcast_by_position(variables: list[Any], root_rank: int) -> None:
    """Broadcast as hvd.broadcast_variables, which would wait for ever if ranks have other names for a variable."""
    def broadcast() -> None:
        for index, variable in enumerate(variables):
            name = f"horovod_oktopk.variable.{index}"
            variable.assign(hvd.broadcast(variable, root_rank, name=name, ignore_name_scope=True))

    tf.function(broadcast, autograph=False)()


def _described(variable: Any) -> str:
    """Return a text without the name, which may hold a counter of all layers that a rank has made."""
    return f"{variable.dtype.name} of shape {tuple(variable.shape)}"


def _difference(theirs: list[list[list[str]]]) -> str:
    every = zip_longest(*(chain.from_iterable(owners) for owners in theirs), fillvalue="none")
    number, differing = next(((i, each) for i, each in enumerate(every) if len(set(each)) > 1), (0, ()))
    found = "; ".join(f"rank {rank}: {variable}" for rank, variable in enumerate(differing))
    return ("the variables of the model and its optimizers differ between the ranks, and cannot be broadcast (of "
            f"those that have not been, number {number} is {found}). Make the same layers and optimizers on all "
            "ranks")


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Average an epoch's metrics over the ranks, vectors too. It comes before the callbacks that are to see the mean.

    Raises:
        AgreementError: On all ranks, at the end of an epoch: some have more batches, or other metrics.

    Examples:
        >>> hvd_keras.callbacks.MetricAverageCallback()
    """

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        names = sorted(logs or {})
        meet(self.model, "average the metrics of an epoch")
        check_alike("metrics", [f"{name} {np.shape(logs[name]) or ''}".rstrip() for name in names] if logs else ())
        if logs:
            values = [np.asarray(logs[name], np.float64) for name in names]
            mine = np.concatenate([value.ravel() for value in values])
            means = hvd.allreduce(tf.constant(mine), op=hvd.Average, name="horovod_oktopk.metrics").numpy()
            parts = np.split(means, np.cumsum([value.size for value in values])[:-1])
            for name, value, mean in zip(names, values, parts, strict=True):
                logs[name] = mean.reshape(value.shape) if value.ndim else float(mean[0])


class LearningRateWarmupCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate from initial_lr / P to initial_lr over the first epochs, batch by batch.

    As Horovod's, after Goyal et al. (2017).

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: how long it takes.
        momentum_correction: must be False: the momentum is a constant in Keras.
        steps_per_epoch: by default what Keras tells.
        verbose: 1: print the learning rate that was reached.

    Raises:
        OptionError: momentum_correction is True.

    Examples:
        >>> hvd_keras.callbacks.LearningRateWarmupCallback(
        ...     initial_lr=0.1 * hvd.size(), warmup_epochs=3)
    """

    def __init__(self, initial_lr: float, warmup_epochs: float = 5, momentum_correction: bool = False,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        super().__init__()
        if momentum_correction:
            raise OptionError("momentum_correction=True is not possible in Keras, where the momentum is a constant: "
                              "leave it out")
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


class SharedParameters(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Have another callback see the parameters that all ranks share, in the middle of an epoch as well.

    With `StepAhead` the model holds a rank's own there. What is under way is applied first, whenever the callback is
    called. It comes after BroadcastGlobalVariablesCallback.

    Args:
        callback: is called inside `with shared_parameters(model):`.

    Examples:
        >>> hvd_keras.callbacks.SharedParameters(
        ...     keras.callbacks.ModelCheckpoint("model.keras", save_freq=100))
    """

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._callback = callback

    def set_params(self, params: Any) -> None:
        """See Keras' Callback."""
        super().set_params(params)
        self._callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """See Keras' Callback."""
        super().set_model(model)
        self._callback.set_model(model)


def _inside(name: str) -> Callable[..., None]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        with shared_parameters(self.model):
            getattr(self._callback, name)(*args, **kwargs)

    return hook


for _name in dir(tf.keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(SharedParameters, _name, _inside(_name))
