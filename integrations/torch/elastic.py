"""Elastic Horovod's TorchState with StepAhead: what it saves and broadcasts of a model is what all ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from horovod_oktopk.torch.private import handled_by
from horovod_oktopk.torch.registry import runs_of
from horovod_oktopk.torch.shared import shared_parameters


def install(state: Any) -> None:
    """Wrap TorchState's save and sync, once."""
    state.save = _wrap_save(state.save)
    state.sync = _wrap_sync(state.sync)


def _trained(state: Any) -> Iterator[Any]:
    """Yield the state's models and optimizers; a state may have samplers, too."""
    return (value for value in handled_by(state) if isinstance(value, torch.nn.Module | torch.optim.Optimizer))


def _wrap_save(save: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(save)
    def wrapped(self: Any) -> None:
        with shared_parameters(*_trained(self)):
            save(self)
    return wrapped


def _wrap_sync(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    """Give a rank that joins the shared parameters, and no residual; the others' residuals stay."""
    @functools.wraps(sync)
    def wrapped(self: Any) -> None:
        for run in runs_of("TorchState", *_trained(self)):
            run.suspend()
        sync(self)
    return wrapped
