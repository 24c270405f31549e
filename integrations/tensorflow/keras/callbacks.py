"""Callbacks for `model.fit`: Horovod's, for either Keras, and those that OkTopk adds."""

from __future__ import annotations

import logging
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partialmethod
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk.errors import AgreementError, OptionError, PluginError
from horovod_oktopk.modes.api import shared_parameters, step_report, synchronize_replicas
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.tensorflow.optimizer import is_distributed
from horovod_oktopk.tensorflow.registry import all_runs_of, each_run_of
from horovod_oktopk.tensorflow.state import check_alike, load_state, meet, read_marks, resume, save_state, suspend
from horovod_oktopk.tensorflow.variables import optimizers_of, tensor_of, variables_in

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback", "SharedParameters", "StateCheckpoint",
           "StepReportLogger"]

logger = logging.getLogger("horovod_oktopk")
NO_WARM_UP = ("there is no LearningRateWarmupCallback here: give the optimizer a learning rate that rises for so "
              "many steps, keras.optimizers.schedules.PolynomialDecay(lr / hvd.size(), steps, lr); or use "
              "keras.callbacks.LearningRateScheduler")
Logs = dict[str, Any] | None
PLAIN = ("the model's optimizer is not distributed: its gradients stay each rank's own. Give model.compile what "
         "hvd_keras.DistributedOptimizer(optimizer, compression=...) returns")


def __getattr__(name: str) -> Any:
    """Raise PluginError for the one callback of Horovod's that is not here."""
    if name == "LearningRateWarmupCallback":
        raise PluginError(NO_WARM_UP)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
        self._between, self._looking = ExitStack(), ExitStack()  # epochs; validation and prediction
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
        if self.model.built and is_distributed(optimizer) and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)
        self._broadcast(must_agree=False)  # what only some ranks have restored waits for the others' first batch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._leave()
        resume(self.model)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_first_batch:
            self._is_first_batch = False
            self._broadcast()
            if not each_run_of(self.model) and not any(map(is_distributed, optimizers_of(self.model))):
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

    def _leave(self) -> None:
        self._looking.close()
        self._between.close()

    def _synchronize(self, doing: str) -> None:
        """Make replicas equal, with Partial; then all ranks must have come for the same."""
        if any(runs.kind.has_rounds for runs in all_runs_of(self.model)):
            synchronize_replicas(self.model)
            check_alike("places in fit", [doing])

    def _broadcast(self, must_agree: bool = True) -> list[Any]:
        """Broadcast what has not been yet, owner by owner, and return it; all ranks send the same."""
        fresh = self._not_sent()
        # Without the names, which may hold a counter of all layers that a rank has made.
        mine = [[f"{v.dtype.name} of shape {tuple(v.shape)}" for v in each] for each in fresh]
        theirs = hvd.allgather_object(mine, name="horovod_oktopk.broadcast")
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
        known = self._sent | {v.ref() for run in each_run_of(self.model) if run.mode.holds_own for v in run.tensors}
        fresh: list[list[Any]] = []
        for variables in owners:
            fresh.append([v for v in map(tensor_of, variables) if v.ref() not in known])
            known.update(v.ref() for v in fresh[-1])
        return fresh


def _broadcast_by_position(variables: list[Any], root_rank: int) -> None:
    """Broadcast as hvd.broadcast_variables, which would wait for ever if ranks have other names for a variable."""
    def broadcast() -> None:
        for index, variable in enumerate(variables):
            name = f"horovod_oktopk.variable.{index}"
            variable.assign(hvd.broadcast(variable, root_rank, name=name, ignore_name_scope=True))

    tf.function(broadcast, autograph=False)()


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
            for name in names:
                mean = hvd.allreduce(np.asarray(logs[name], np.float64), op=hvd.Average,
                                     name=f"horovod_oktopk.metrics.{name}").numpy()
                logs[name] = mean if mean.ndim else float(mean)


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
        super().set_params(params)
        self._callback.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._callback.set_model(model)

    def _inside(self, name: str, *args: Any, **kwargs: Any) -> None:
        with shared_parameters(self.model):
            getattr(self._callback, name)(*args, **kwargs)


for _name in dir(tf.keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(SharedParameters, _name, partialmethod(SharedParameters._inside, _name))


class StepReportLogger(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Puts what OkTopk did into `logs`: History, CSVLogger, TensorBoard and the progress bar show it.

    Of the last step: oktopk_density, oktopk_k, oktopk_local_selected, oktopk_global_selected and both thresholds;
    with `StepAhead` on several ranks oktopk_gain and oktopk_noise_scale. In an epoch's logs the means of its steps:
    oktopk_bytes_sent by this rank; with `Partial` oktopk_rounds, oktopk_active_ranks, oktopk_staleness (of the rank
    that lags most); and the sum oktopk_seconds_saved. It comes before the callbacks that are to see them.

    Examples:
        >>> logger = hvd_keras.callbacks.StepReportLogger()
        >>> history = model.fit(data, callbacks=[logger])
        >>> history.history["oktopk_bytes_sent"]
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._steps: defaultdict[str, list[float]] = defaultdict(list)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        report = step_report(self.model)
        if report is not None and logs is not None:
            for name, figure in _figures(report).items():
                self._steps[name].append(figure)
                logs[name] = figure

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs |= {name: OF_EPOCH.get(name, itemgetter(-1))(figures) for name, figures in self._steps.items()}


OF_EPOCH: dict[str, Callable[[list[float]], float]] = {
    **{f"oktopk_{name}": statistics.fmean for name in ("bytes_sent", "rounds", "active_ranks", "staleness")},
    "oktopk_seconds_saved": sum}
"""The figure of an epoch's logs, from those of its steps; by default the last."""
SHOWN = ("k", "local_selected", "global_selected", "local_threshold", "global_threshold", "bytes_sent", "rounds",
         "seconds_saved", "gain", "noise_scale")


def _figures(report: StepReport) -> dict[str, float]:
    found = report.scalars()
    figures = {name: found[f"oktopk/{name}"] for name in SHOWN if f"oktopk/{name}" in found}
    figures["density"] = report.k / max(1, report.n)  # 0 / 0 where all are sparse
    if report.active:
        figures |= {"active_ranks": sum(report.active), "staleness": max(report.staleness)}
    return {f"oktopk_{name}": figure for name, figure in figures.items()}


class StateCheckpoint(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves residuals and counters after every epoch, and takes them back when training begins.

    It goes with ModelCheckpoint or BackupAndRestore, which save the model, and comes after them in the list.

    Args:
        filepath: the file, on rank 0's disk; `"{epoch}"` stands for the epoch, from 1, and `"{loss:.2f}"` for what
            rank 0's logs have, as in ModelCheckpoint.
        restore: the file to load when training begins, of this callback or of `save_state`; by default filepath,
            which with such names in it is none. It is taken if its step, if it tells that, is the model's.

    Raises:
        OptionError: On all ranks, at the end of an epoch: filepath has a name that the logs do not have.
        OSError: On all ranks, at the end of an epoch: the file cannot be written.

    Examples:
        >>> hvd_keras.callbacks.StateCheckpoint("residuals.npz")
    """

    def __init__(self, filepath: str | os.PathLike[str], restore: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._path = os.fspath(filepath)
        self._restore = os.fspath(restore) if restore is not None else self._path

    def on_train_begin(self, logs: Logs = None) -> None:
        # Rank 0 decides, as the others may not see its disk.
        found = hvd.broadcast_object(self._look() if hvd.rank() == 0 else None, root_rank=0,
                                     name="horovod_oktopk.checkpoint")
        if found is None:
            load_state(self.model, self._restore)
        elif found:
            kept = "stay as they are" if each_run_of(self.model) else "start at zero"
            logger.warning("residuals %s: %s", kept, found)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not each_run_of(self.model):
            logger.warning("no residuals were saved: no optimizer that the model has as an attribute, and no tape "
                           "over its variables, has reduced a gradient with compression=OkTopk(...) yet. "
                           "Give that, or leave StateCheckpoint out")
        else:
            meet(self.model, "save the state at the end of an epoch")
            path, wrong = hvd.broadcast_object(self._file_of(epoch, logs) if hvd.rank() == 0 else None,
                                               root_rank=0, name="horovod_oktopk.path")
            if wrong:
                raise OptionError(wrong)
            save_state(self.model, path, iterations=self._iterations())

    def _file_of(self, epoch: int, logs: Logs) -> tuple[str, str | None]:
        try:
            return self._path.format(**{**(logs or {}), "epoch": epoch + 1}), None
        except Exception as error:  # whatever it is, the other ranks wait for it
            return "", (f"the path {self._path!r} of StateCheckpoint cannot be filled in ({type(error).__name__}: "
                        f"{error}): use what this epoch has, {['epoch', *sorted(logs or {})]}")

    def _look(self) -> str | None:
        """Return None if the file is to be loaded; else the reason, or "" if it is no surprise."""
        try:
            if not Path(self._restore).exists():
                return ""
            saved = read_marks(self._restore).get("iterations", self._iterations())
        except (OSError, OptionError) as error:
            return f"{self._restore} cannot be read: {error}"
        if saved != self._iterations():
            return (f"{self._restore} is of step {saved}, the model of step {self._iterations()}: put "
                    "StateCheckpoint after the callback that loads the model")
        return None

    def _iterations(self) -> int:
        return sum(int(optimizer.iterations.numpy()) for optimizer in optimizers_of(self.model))
