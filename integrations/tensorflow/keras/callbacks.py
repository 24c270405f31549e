"""Callbacks for `model.fit`: Horovod's (our own under Keras 3), and those that OkTopk adds."""

from __future__ import annotations

import logging
import os
import statistics
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd

import tensorflow as tf

from ...schedule import GTOPK_DENSITIES, Schedule, density_of_epoch
from ..plugin import set_density, step_report
from ..registry import reducers_of, reductions_of
from ..state import load_state, read_marks, save_state
from ..versions import KERAS_3

if KERAS_3:
    from .horovod_callbacks import (
        BroadcastGlobalVariablesCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )
else:
    from .legacy import BroadcastGlobalVariablesCallback, LearningRateWarmupCallback, MetricAverageCallback

__all__ = ["BroadcastGlobalVariablesCallback", "DensityWarmup", "LearningRateWarmupCallback", "MetricAverageCallback",
           "StateCheckpoint", "StepReportLogger"]

logger = logging.getLogger("horovod_oktopk")
Logs = dict[str, Any] | None


class DensityWarmup(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Selects more in the first epochs, as gTop-k does (Shi et al., ICDCS 2019), with its densities.

    schedule: densities of the first epochs, after which that of the options holds; or a function of the
    epoch (from 0) that gives a density, or None for that of the options. Raises OptionError where it is not
    allowed.
    """

    def __init__(self, schedule: Schedule = GTOPK_DENSITIES) -> None:
        super().__init__()
        self._density_of = density_of_epoch(schedule)
        self._final: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._final is None:
            reductions = reductions_of(self.model)
            self._final = None if reductions is None else reductions.options.density
        density = self._density_of(epoch)
        set_density(self.model, density if density is not None else self._final or 0.0)


class StepReportLogger(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Puts what OkTopk did into `logs`: History, CSVLogger, TensorBoard and the progress bar show it.

    Of the last step: oktopk_density, oktopk_k, oktopk_local_selected, oktopk_global_selected and both
    thresholds; oktopk_bytes_sent by this rank: of the step, and in an epoch's logs the mean of its steps.
    Comes before the callbacks that are to see it.
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._bytes: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        report = step_report(self.model)
        if report is not None and logs is not None:
            self._bytes.append(report.bytes_sent)
            logs |= self._figures()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._bytes and logs is not None:
            logs |= {**self._figures(), "oktopk_bytes_sent": statistics.fmean(self._bytes)}

    def _figures(self) -> dict[str, float]:
        report = step_report(self.model)
        assert report is not None
        names = ("k", "local_selected", "global_selected", "local_threshold", "global_threshold", "bytes_sent")
        figures = {f"oktopk_{name}": float(getattr(report, name)) for name in names}
        return {"oktopk_density": report.k / report.n, **figures}


class StateCheckpoint(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves residuals and counters after every epoch, and takes them back when training begins.

    It goes with ModelCheckpoint or BackupAndRestore, which save the model, and comes after them in the
    list. filepath: of the file on rank 0's disk; "{epoch}" stands for the epoch, from 1.
    restore: the file to load when training begins; by default filepath, if there is one and its step is the model's.
    """

    def __init__(self, filepath: str | os.PathLike[str], restore: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._path = os.fspath(filepath)
        self._restore = os.fspath(restore) if restore is not None else self._path

    def on_train_begin(self, logs: Logs = None) -> None:
        # Rank 0 decides, as the others may not see its disk.
        found = hvd.broadcast_object(self._look(), root_rank=0, name="horovod_oktopk.checkpoint")
        if found is None:
            load_state(self.model, self._restore)
        elif found:
            logger.warning("residuals start at zero: %s", found)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if reducers_of(self.model):
            save_state(self.model, self._path.format(epoch=epoch + 1), iterations=self._iterations())

    def _look(self) -> str | None:
        """None where the file is to be loaded; else why not, or "" where that is no surprise."""
        if not Path(self._restore).exists():
            return ""
        saved = read_marks(self._restore)["iterations"]
        if saved != self._iterations():
            return f"{self._restore} is of step {saved}, the model of step {self._iterations()}"
        return None

    def _iterations(self) -> int:
        return int(self.model.optimizer.iterations.numpy())
