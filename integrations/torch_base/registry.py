"""The distributed optimizers that there are, and the run of each."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.api import Owner
from horovod_oktopk.schemes.report import StepReport

if TYPE_CHECKING:  # it imports this module
    from horovod_oktopk.torch_base.run import Run

RUN = "_oktopk_run"
KEEPER = "_oktopk_keeper"
"""An attribute of a parameter that StepAhead trains; see Keeper."""
_optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""In the order in which they were made: the same on all ranks."""
_dense: weakref.WeakSet[Any] = weakref.WeakSet()


class Keeper:
    """Keeps the optimizer of a parameter that holds this rank's own values, as what ranks share is known there alone.

    So the optimizer lives as long as the parameter, or until another one trains it. A copy of a parameter, or a file,
    has an empty dictionary in its place, which `torch.load(weights_only=True)` allows.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> Any:
        return OrderedDict, ()


def keep(parameters: Iterable[torch.Tensor], optimizer: Any) -> None:
    """Have these parameters, which hold this rank's own values from now on, keep their optimizer."""
    keeper = Keeper(optimizer)
    for p in parameters:
        setattr(p, KEEPER, keeper)


def release(parameters: Iterable[torch.Tensor], optimizer: Any) -> None:
    """Have these parameters, which hold what all ranks share, keep their optimizer no longer."""
    for p in parameters:
        if _keeper_of(p) is optimizer:
            delattr(p, KEEPER)


def _keeper_of(p: torch.Tensor) -> Any:
    keeper = getattr(p, KEEPER, None)
    return keeper.optimizer if isinstance(keeper, Keeper) else None


def add(optimizer: Any, run: Run) -> None:
    """Keep the run of an optimizer, on the optimizer itself."""
    setattr(optimizer, RUN, run)
    _optimizers[optimizer] = None


def add_dense(optimizer: Any) -> None:
    """Remember an optimizer that was made with `Dense()`, which the library reduces itself."""
    _dense.add(optimizer)


def is_dense(target: Any) -> bool:
    """Return True if an optimizer was made with `Dense()`, or one that trains a parameter of a model."""
    if isinstance(target, torch.nn.Module):
        return bool(_trained_by(_dense, target.parameters()))
    inner = getattr(target, "optimizer", None)
    return any(each is target for each in _dense) or (inner is not None and is_dense(inner))


def is_in_use() -> bool:
    """Return True if an optimizer of ours lives in this process."""
    return len(_optimizers) > 0


def run_of(optimizer: Any) -> Run | None:
    """Return the run of an optimizer of ours, also inside a library's wrapper (Accelerate's); None for any other."""
    run: Run | None = getattr(optimizer, RUN, None)
    inner = getattr(optimizer, "optimizer", None)
    return run_of(inner) if run is None and inner is not None else run


def own_run_of(optimizer: Any) -> Run:
    """Return the run of an optimizer of ours. Raise PluginError for any other."""
    run = run_of(optimizer)
    if run is None:
        raise PluginError(f"{type(optimizer).__name__} was not made by DistributedOptimizer(..., "
                          "compression=OkTopk(...)): give the optimizer that this has returned")
    return run


class DenseOwner:
    """An optimizer that the library reduces: it has no report and no density, and all that it holds is shared."""

    def reports(self) -> list[StepReport]:
        return []

    def set_density(self, density: float | None) -> None: ...

    def catch_up(self) -> None: ...

    def synchronize_replicas(self) -> None: ...

    def shared(self) -> AbstractContextManager[None]:
        return nullcontext()


def owners_of(target: Any) -> list[Owner] | None:
    """Return the owners of an optimizer or a model, and None for anything else; see `find_by`."""
    if not (isinstance(target, torch.nn.Module) or _is_optimizer(target)):
        return None
    return [*runs_of(target), *([DenseOwner()] if is_dense(target) else [])]


def runs_of(target: Any) -> list[Run]:
    """Return the run of an optimizer, or those of all optimizers that train a parameter of a model."""
    if isinstance(target, torch.nn.Module):
        return runs_over(target.parameters())
    run = run_of(target)
    return [] if run is None else [run]


def runs_over(parameters: Iterable[torch.Tensor]) -> list[Run]:
    """Return the runs of all optimizers that train one of the parameters, or have trained it and are to be kept."""
    parameters = list(parameters)
    found = {id(each) for each in (*_trained_by(_optimizers, parameters), *map(_keeper_of, parameters))}
    return [own_run_of(each) for each in list(_optimizers) if id(each) in found]


def holders_of(tensors: Iterable[torch.Tensor]) -> list[Run]:
    """Return the runs that hold this rank's own values in the memory of these tensors, which may be detached."""
    places = {tensor.data_ptr() for tensor in tensors if tensor.numel()}
    runs = (run for run in map(own_run_of, list(_optimizers)) if run.mode is not None and run.mode.holds_own)
    return [run for run in runs if any(p.data_ptr() in places for p in run.layout.parameters)]


def _trained_by(optimizers: Iterable[Any], parameters: Iterable[torch.Tensor]) -> list[Any]:
    wanted = set(parameters)
    return [each for each in list(optimizers)
            if any(p in wanted for group in each.param_groups for p in group["params"])]


def make_way(parameters: Iterable[torch.Tensor]) -> None:
    """Suspend the optimizers of these parameters, of which a new one is made; warn if it may build on unlike ones."""
    for run in runs_over(parameters):
        run.suspend(for_another=True)
    for run in map(own_run_of, list(_optimizers)):
        run.warn_if_frozen()


def _is_optimizer(target: Any) -> bool:
    inner = getattr(target, "optimizer", None)
    return isinstance(target, torch.optim.Optimizer) or (inner is not None and _is_optimizer(inner))
