"""Callbacks for `model.fit`: Horovod's, for either Keras, and those that OkTopk adds."""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import NO_SCHEDULE, OptionError, gone
from horovod_oktopk.modes.api import step_report
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.tensorflow.keras.horovod_callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    SharedParameters,
)
from horovod_oktopk.tensorflow.registry import each_run_of
from horovod_oktopk.tensorflow.shared import meet
from horovod_oktopk.tensorflow.state import load_state, read_marks, save_state
from horovod_oktopk.tensorflow.variables import optimizers_of

__all__ = ["BroadcastGlobalVariablesCallback", "LearningRateWarmupCallback", "MetricAverageCallback",
           "SharedParameters", "StateCheckpoint", "StepReportLogger"]

logger = logging.getLogger("horovod_oktopk")
__getattr__ = gone(__name__, {
    "DensityWarmup": f"{NO_SCHEDULE}, in the on_epoch_begin of a LambdaCallback",
    "SynchronizeReplicas": "BroadcastGlobalVariablesCallback(0), first in the list, makes the replicas equal"})
Logs = dict[str, Any] | None


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


def _figures(report: StepReport) -> dict[str, float]:
    names = ["k", "local_selected", "global_selected", "local_threshold", "global_threshold", "bytes_sent"]
    names += [] if math.isnan(report.noise_scale) else ["gain", "noise_scale"]
    figures = {name: float(getattr(report, name)) for name in names}
    figures["density"] = report.k / max(1, report.n)  # 0 / 0 where all are sparse
    if report.active or report.rounds != 1:
        figures |= {"rounds": report.rounds, "seconds_saved": report.seconds_saved}
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
        """Return the path, and the reason why there is none, or None."""
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
