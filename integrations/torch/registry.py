"""Which reducer serves an optimizer: the one thing that all of this integration's modules need to know."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.torch.reducer import Reducer
from horovod_oktopk.torch.step_ahead import StepAheadReducer

AnyReducer = Reducer | StepAheadReducer

_ATTRIBUTE = "_oktopk_reducer"
_optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""Those that have a reducer, in the order in which they were made: the same on all ranks."""


def register(optimizer: Any, reducer: AnyReducer) -> None:
    """Makes the reducer the optimizer's."""
    setattr(optimizer, _ATTRIBUTE, reducer)
    _optimizers[optimizer] = None


def is_in_use() -> bool:
    """Whether an optimizer of ours lives in this process."""
    return len(_optimizers) > 0


def reducer_of(optimizer: Any) -> AnyReducer | None:
    """The reducer of an optimizer of ours, also inside a library's wrapper (Accelerate's); None for any other."""
    reducer: AnyReducer | None = getattr(optimizer, _ATTRIBUTE, None)
    inner = getattr(optimizer, "optimizer", None)
    return reducer_of(inner) if reducer is None and inner is not None else reducer


def gradient_reducer_of(optimizer: Any) -> Reducer | None:
    """The same, if it reduces gradients; None with StepAhead, which leaves them alone."""
    reducer = reducer_of(optimizer)
    return reducer if isinstance(reducer, Reducer) else None


def reducers_of(function: str, *targets: Any) -> list[AnyReducer]:
    """Those of optimizers, of models, or of lists of these; each once. A model has the reducers of all optimizers
    that train one of its parameters, whatever module is wrapped around it.

    function: what was called with the targets.
    Raises PluginError for what is neither an optimizer nor a model.
    """
    found: dict[AnyReducer, None] = {}
    for target in targets:
        if isinstance(target, list | tuple):
            found |= dict.fromkeys(reducers_of(function, *target))
        elif isinstance(target, torch.nn.Module):
            found |= dict.fromkeys(_reducers_over(set(target.parameters())))
        elif _is_optimizer(target):
            reducer = reducer_of(target)
            found |= {} if reducer is None else {reducer: None}
        else:
            raise PluginError(f"{function} takes optimizers, models (torch.nn.Module), or lists of these; got "
                              f"{type(target).__name__}: write {function}(optimizer)")
    return list(found)


def _reducers_over(parameters: set[torch.nn.Parameter]) -> list[AnyReducer]:
    over = (each for each in list(_optimizers)
            if any(p in parameters for group in each.param_groups for p in group["params"]))
    return [reducer for optimizer in over if (reducer := reducer_of(optimizer)) is not None]


def _is_optimizer(target: Any) -> bool:
    """Whether it is one, also inside a library's wrapper."""
    if isinstance(target, torch.optim.Optimizer) or reducer_of(target) is not None:
        return True
    inner = getattr(target, "optimizer", None)
    return inner is not None and _is_optimizer(inner)
