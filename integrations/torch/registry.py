"""The distributed optimizers of this process: all that this integration's modules need to know of one another."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from horovod_oktopk.errors import PluginError

if TYPE_CHECKING:
    from horovod_oktopk.torch.optimizer import Run

ATTRIBUTE = "_oktopk_run"
_optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""In the order in which they were made: the same on all ranks."""


def register(optimizer: Any, run: Run) -> None:
    """Make the run the optimizer's."""
    setattr(optimizer, ATTRIBUTE, run)
    _optimizers[optimizer] = None


def is_in_use() -> bool:
    """Return True if an optimizer of ours lives in this process."""
    return len(_optimizers) > 0


def run_of(optimizer: Any) -> Run | None:
    """Return the run of an optimizer of ours, also inside a library's wrapper (Accelerate's); None for any other."""
    run: Run | None = getattr(optimizer, ATTRIBUTE, None)
    inner = getattr(optimizer, "optimizer", None)
    return run_of(inner) if run is None and inner is not None else run


def own_run_of(optimizer: Any) -> Run:
    """Return the run of an optimizer of ours. Raise PluginError for any other."""
    run = run_of(optimizer)
    if run is None:
        raise PluginError(f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer(..., "
                          "compression=OkTopk(...)): give the optimizer that this has returned")
    return run


def owners_of(target: Any) -> list[Run] | None:
    """Return the run of an optimizer, or those of all optimizers that train a parameter of a model; see `find_by`."""
    if isinstance(target, torch.nn.Module):
        return runs_over(target.parameters())
    run = run_of(target)
    return [run] if run is not None else [] if _is_optimizer(target) else None


def runs_over(parameters: Iterator[torch.Tensor]) -> list[Run]:
    """Return the runs of all optimizers that train one of the parameters."""
    wanted = set(parameters)
    over = (each for each in list(_optimizers)
            if any(p in wanted for group in each.param_groups for p in group["params"]))
    return [run for optimizer in over if (run := run_of(optimizer)) is not None]


def _is_optimizer(target: Any) -> bool:
    inner = getattr(target, "optimizer", None)
    return isinstance(target, torch.optim.Optimizer) or (inner is not None and _is_optimizer(inner))
