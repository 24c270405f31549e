"""The private names of other packages that this integration needs; it uses no others.

SEEN has the versions in which they were seen, NAMES what a test looks for when one changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

SEEN = {"torch": "2.13"}
NAMES = (
    "torch:Tensor._indices",
    "torch:Tensor._values",
    "torch:Tensor._version",
    "torch.autograd.profiler:_is_profiler_enabled",
    "torch.distributed.checkpoint.state_dict:_init_optim_state",
)
"""Modules and what is in them. Of objects: `_optimizer_step_post_hooks`."""
SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""An attribute of fused optimizers: GradScaler then calls `step` whatever it has found."""
SCHEDULED = "_wrapped_by_lr_sched"
"""An attribute of a step that notes for a learning-rate scheduler that it was called."""


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sparse gradient: int64, shape (m,); a row may come twice."""
    return gradient._indices()[0]


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse gradient, by its rows; all of a dense one."""
    return gradient._values() if gradient.is_sparse else gradient


def versions_of(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each of them was written over, by steps and the program; but for writes to `p.data`."""
    return [p._version for p in parameters]


def makes_state_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the step at hand is one that torch.distributed.checkpoint takes for the state that it makes.

    The gradients are zeros then, and the learning rates are 0; but so they may be in a step of training.
    """
    if optimizer.state:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame.f_code.co_name == "_init_optim_state"


def come_first(optimizer: torch.optim.Optimizer, hook: Any) -> None:
    """Have the hook of this handle, which runs after steps, run before all others."""
    optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]


def span(name: str) -> AbstractContextManager[Any]:
    """Return a range of this name, if a profiler is on; without one, record_function would still take 10 µs."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()
