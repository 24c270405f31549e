"""Callbacks for the logs: metrics that are the mean of all ranks, and what a step sent."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk.modes.api import step_report
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.tensorflow.keras.callbacks.broadcast import Logs
from horovod_oktopk.tensorflow.state import check_alike, meet


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Average an epoch's metrics over the ranks, vectors too. It comes before the callbacks that are to see the mean.

    Args:
        device: is of no effect; Horovod's callback has this argument.

    Raises:
        AgreementError: On all ranks, at the end of an epoch: some have more batches, or other metrics.

    Examples:
        >>> hvd_keras.callbacks.MetricAverageCallback()
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        metrics = list(_metrics_in(logs or {}))
        meet(self.model, "average the metrics of an epoch")
        check_alike("metrics", [f"{path} {np.shape(within[name]) or ''}".rstrip() for path, within, name in metrics])
        for path, within, name in metrics:
            mean = hvd.allreduce(np.asarray(within[name], np.float64), op=hvd.Average,
                                 name=f"horovod_oktopk.metrics.{path}").numpy()
            within[name] = mean if mean.ndim else float(mean)


def _metrics_in(logs: dict[str, Any], before: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the path of each metric, the dictionary that has it, and its name there; tf-keras leaves them nested."""
    for name in sorted(logs):
        if isinstance(logs[name], dict):
            yield from _metrics_in(logs[name], f"{before}{name}/")
        else:
            yield before + name, logs, name


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
SHOWN = ("density", "k", "local_selected", "global_selected", "local_threshold", "global_threshold", "bytes_sent",
         "rounds", "seconds_saved", "gain", "noise_scale")


def _figures(report: StepReport) -> dict[str, float]:
    found = report.scalars()
    figures = {name: found[f"oktopk/{name}"] for name in SHOWN if f"oktopk/{name}" in found}
    if report.active:
        figures |= {"active_ranks": sum(report.active), "staleness": max(report.staleness)}
    return {f"oktopk_{name}": figure for name, figure in figures.items()}
