"""The residual and the counters in files, and in Horovod's elastic states.

They never lie in variables, which Horovod overwrites with rank 0's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from horovod.common.elastic import State
from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

from horovod_oktopk.errors import PluginError
from horovod_oktopk.state import gather
from horovod_oktopk.tensorflow.plugin import synchronize_replicas
from horovod_oktopk.tensorflow.registry import all_runs_of, each_run_of, expect_state, runs_by_optimizer, runs_over
from horovod_oktopk.tensorflow.run import Run
from horovod_oktopk.tensorflow.shared import shared_parameters, suspend
from horovod_oktopk.transport.horovod import count_resets

PathLike = str | os.PathLike[str]


def install() -> None:
    """Make the elastic states commit and restore this rank's residuals with the variables; once."""
    for cls in (TensorFlowKerasState, TensorFlowState):
        if not hasattr(cls._save_model, "_oktopk_installed"):
            cls._save_model, cls._load_model = wrap_save(cls._save_model), wrap_load(cls._load_model)
            cls.sync = _wrap_sync(cls.sync)
    count_resets(State)


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


def read_marks(path: PathLike) -> dict[str, Any]:
    """Return the plain values that `save_state` stored. Raise OptionError if this rank cannot read the file."""
    return gather.read_marks(path)


def _runs(state: Any) -> list[Run]:
    if isinstance(state, TensorFlowState):
        variables = list(state.variables)
        return [*each_run_of(variables), *runs_over(variables)]
    return each_run_of(state.optimizer) or each_run_of(state.model)


def _trained(state: Any) -> Any:
    return list(state.variables) if isinstance(state, TensorFlowState) else state.model


def wrap_save(save: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap an elastic state's method that commits the variables: as all ranks share them, and the residuals too."""
    @functools.wraps(save)
    def wrapped(self: Any) -> None:
        with shared_parameters(_trained(self)):
            save(self)
        self._oktopk_records = {run: run.mode.records() for run in _runs(self)}

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    return wrapped


def wrap_load(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap an elastic state's method that takes the committed variables back: the residuals as well."""
    @functools.wraps(load)
    def wrapped(self: Any) -> None:
        load(self)
        for run in _runs(self):
            run.mode.load(self._oktopk_records.get(run, []))
            run.mode.resume()

    return wrapped


def _wrap_sync(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `sync`: with StepAhead a rank that joins gets what all share, and no residual; the others' stays."""
    @functools.wraps(sync)
    def wrapped(self: Any) -> None:
        suspend(_trained(self))
        sync(self)

    return wrapped
