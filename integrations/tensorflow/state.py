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
from horovod_oktopk.reducer import checkpoint
from horovod_oktopk.tensorflow.plugin import synchronize_replicas
from horovod_oktopk.tensorflow.registry import expect_state, gradient_reducers_of, reducers_by_optimizer, reducers_of
from horovod_oktopk.tensorflow.shared import shared_parameters, suspend
from horovod_oktopk.tensorflow.step_ahead import step_aheads_over
from horovod_oktopk.transport.horovod import count_resets

PathLike = str | os.PathLike[str]


def install() -> None:
    """Makes the elastic states commit and restore this rank's residuals with the variables; once."""
    for cls in (TensorFlowKerasState, TensorFlowState):
        if not hasattr(cls._save_model, "_oktopk_installed"):
            cls._save_model, cls._load_model = wrap_save(cls._save_model), wrap_load(cls._load_model)
            cls.sync = _wrap_sync(cls.sync)
    count_resets(State)


def save_state(target: Any, path: PathLike, **marks: Any) -> None:
    """Writes the residuals and counters of all ranks to one file.

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
    owners = gradient_reducers_of(target)
    if owners and not any(each.takes_part for each in owners):
        return
    synchronize_replicas(target)
    several = reducers_by_optimizer(target)
    if not any(several):
        raise PluginError(f"there is no state to save: no gradient of {target!r} has been reduced with OkTopk yet")
    numbers = [number for number, reducers in enumerate(several) for _ in reducers]
    checkpoint.save([reducer.flat for reducers in several for reducer in reducers], path, numbers, **marks)


def load_state(target: Any, path: PathLike) -> None:
    """Takes what `save_state` wrote, when the next step is taken.

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
    """The plain values that `save_state` stored. Raises OptionError where this rank cannot read the file."""
    return checkpoint.read_marks(path)


def _reducers(state: Any) -> list[Any]:
    if isinstance(state, TensorFlowState):
        variables = list(state.variables)
        return [*reducers_of(variables), *step_aheads_over(variables)]
    return reducers_of(state.optimizer) or reducers_of(state.model)


def _trained(state: Any) -> Any:
    return list(state.variables) if isinstance(state, TensorFlowState) else state.model


def wrap_save(save: Callable[[Any], None]) -> Callable[[Any], None]:
    """An elastic state's method that commits the variables, as all ranks share them: it commits the residuals too."""
    @functools.wraps(save)
    def wrapped(self: Any) -> None:
        with shared_parameters(_trained(self)):
            save(self)
        self._oktopk_records = {reducer: reducer.flat.record() for reducer in _reducers(self)}

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    return wrapped


def wrap_load(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """An elastic state's method that takes the committed variables back: it takes back the residuals as well."""
    @functools.wraps(load)
    def wrapped(self: Any) -> None:
        load(self)
        for reducer in _reducers(self):
            saved = self._oktopk_records.get(reducer)
            reducer.flat.load([] if saved is None else [saved])

    return wrapped


def _wrap_sync(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    """With StepAhead a rank that joins gets what all share, and no residual; the others' stays."""
    @functools.wraps(sync)
    def wrapped(self: Any) -> None:
        suspend(_trained(self))
        sync(self)

    return wrapped
