"""The residual and the counters in files, and in Horovod's elastic states.

They never lie in variables, which Horovod overwrites with rank 0's.
"""

from __future__ import annotations

import os
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import State
from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.api import shared_parameters, synchronize_replicas
from horovod_oktopk.state import gather
from horovod_oktopk.tensorflow.registry import all_runs_of, each_run_of, expect_state, runs_by_optimizer, runs_over
from horovod_oktopk.tensorflow.run import Run
from horovod_oktopk.tensorflow.shared import suspend
from horovod_oktopk.tensorflow.variables import tensor_of, variables_in
from horovod_oktopk.transport.horovod import ElasticState, extend_elastic

PathLike = str | os.PathLike[str]


def install() -> None:
    """Make Horovod's elastic states save and restore this rank's residuals with the variables."""
    for cls in (TensorFlowKerasState, TensorFlowState):
        extend_elastic(State, cls, ElasticVariables)


def save_state(target: Any, path: PathLike, **marks: Any) -> None:
    """Write the residuals and counters of all ranks to one file.

    It is called on all ranks together; rank 0 writes.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.
        path: the file, on rank 0's disk.
        **marks: plain values to be stored beside it, which `read_marks` (of `horovod_oktopk.tensorflow.state`) gives
            back.

    Raises:
        PluginError: Nothing has been reduced yet.
        OSError: On all ranks: rank 0 cannot write the file, as the disk is full, say. Training may go on.
        OptionError: On all ranks: marks are not plain values.

    Examples:
        >>> save_state(model, "residuals.npz")
    """
    owners = all_runs_of(target)
    if owners and not any(each.takes_part for each in owners):
        return
    synchronize_replicas(target)
    several = runs_by_optimizer(target)
    if not any(several):
        raise PluginError(f"there is no state to save: no gradient of {target!r} has been reduced with OkTopk yet: "
                          "save it after the first step")
    numbers = [number for number, runs in enumerate(several) for _ in runs]
    gather.save([run.mode for runs in several for run in runs], path, numbers, **marks)


def load_state(target: Any, path: PathLike) -> None:
    """Take what `save_state` wrote, when the next step is taken.

    It is called on all ranks together; rank 0 reads the file. At the same number of ranks each gets its own residual
    back, and the run goes on with the same bits; at another the sum of the residuals is kept. A residual of another
    dtype is converted: from float64 to float32 it is rounded. The next step raises OptionError on all ranks, and
    takes nothing, if the file does not fit, or is damaged.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.
        path: the file, on rank 0's disk.

    Examples:
        >>> load_state(model, "residuals.npz")
    """
    expect_state(target, path)


read_marks = gather.read_marks


class KerasState(TensorFlowKerasState):  # type: ignore[misc]
    """Model and optimizer, committed, restored and taken from rank 0 as by Horovod's; residuals stay each rank's own.

    Args:
        model: built, and compiled unless an optimizer is given.
        optimizer: the model's, if none is given.
        **kwargs: more values to keep, as in Horovod's.

    Examples:
        >>> state = hvd_keras.KerasState(model, epoch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer = optimizer or model.optimizer
        if not getattr(optimizer, "built", False):
            optimizer.build(model.trainable_variables)
        super().__init__(model, optimizer=optimizer, **kwargs)
        self._bcast_model = lambda: hvd.broadcast_variables(self._variables(), root_rank=0)

    def _variables(self) -> list[Any]:
        return [tensor_of(v) for v in (*self.model.weights, *variables_in(self.optimizer))]

    def _save_model(self) -> None:
        self._saved = [tf.identity(variable) for variable in self._variables()]

    def _load_model(self) -> None:
        for variable, saved in zip(self._variables(), self._saved, strict=True):
            variable.assign(saved)


class ElasticVariables(ElasticState):
    """The mixin of Horovod's elastic states of a model, or of variables."""

    def save(self) -> None:
        """Save the variables, as all ranks share them, and this rank's residuals."""
        with shared_parameters(_trained(self)):
            super().save()  # type: ignore[misc]
        self._note_own()

    def restore(self) -> None:
        """Restore the variables and this rank's residuals."""
        super().restore()  # type: ignore[misc]
        for run in _runs(self):
            run.mode.load(self._oktopk_records.get(run, []))
            run.mode.resume()

    def sync(self) -> None:
        """Give a rank that joins the shared parameters, and no residual; the others' residuals stay."""
        suspend(_trained(self))
        super().sync()  # type: ignore[misc]
        self._note_own()

    def _when_made(self) -> None:
        with shared_parameters(_trained(self)):
            self._save_model()  # type: ignore[attr-defined]
        self._note_own()

    def _note_own(self) -> None:
        self._oktopk_records = {run: run.mode.records() for run in _runs(self)}


def _runs(state: Any) -> list[Run]:
    if isinstance(state, TensorFlowState):
        variables = list(state.variables)
        return [*each_run_of(variables), *runs_over(variables)]
    return each_run_of(state.optimizer) or each_run_of(state.model)


def _trained(state: Any) -> Any:
    return list(state.variables) if isinstance(state, TensorFlowState) else state.model
