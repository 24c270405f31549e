"""torch.amp.GradScaler: keeps the residual in one unit while the loss scale changes.

Horovod sees scaled gradients, so the residual holds the scale too. Which scaler serves an optimizer is
known when it unscales it; until then (a resumed run's first step) the last scaler used tells the scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.reducer.flat import FlatReducer
from horovod_oktopk.torch.loss_scale import note_scaler
from horovod_oktopk.torch.registry import gradient_reducer_of, reducer_of
from horovod_oktopk.torch.step_ahead import StepAheadReducer

NOT_SYNCHRONIZED = ("a GradScaler would look for overflow in gradients that are not reduced yet, and the ranks would "
                    "drift apart. Write: optimizer.synchronize(); scaler.unscale_(optimizer); "
                    "with optimizer.skip_synchronize(): scaler.step(optimizer)")


def install() -> None:
    """Wraps GradScaler's methods; once. Other optimizers are left alone."""
    cls = torch.amp.GradScaler
    if getattr(cls, "_oktopk_installed", False):
        return
    cls.scale = _wrap_scale(cls.scale)  # type: ignore[method-assign]
    cls.unscale_ = _wrap_unscale(cls.unscale_)  # type: ignore[method-assign]
    cls.step = _wrap_step(cls.step)  # type: ignore[method-assign]
    cls._maybe_opt_step = _wrap_maybe_step(cls._maybe_opt_step)  # type: ignore[method-assign]
    cls._oktopk_installed = True  # type: ignore[attr-defined]


def _wrap_scale(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def wrapped(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            note_scaler(self)
        return scale(self, outputs)
    return wrapped


def _wrap_unscale(unscale: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(unscale)
    def wrapped(self: Any, optimizer: Any) -> None:
        reducer = gradient_reducer_of(optimizer)
        if reducer is not None and self.is_enabled():
            _require_synchronized(optimizer)
            reducer.scaler = self
            reducer.when_flat(functools.partial(_adopt_scale, float(self.get_scale())))
        elif self.is_enabled():
            _require_averages(optimizer)
        unscale(self, optimizer)
    return wrapped


def _wrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if gradient_reducer_of(optimizer) is not None and self.is_enabled():
            _require_synchronized(optimizer)
        elif self.is_enabled():
            _require_averages(optimizer)
        return step(self, optimizer, *args, **kwargs)
    return wrapped


def _wrap_maybe_step(maybe_step: Callable[..., Any]) -> Callable[..., Any]:
    """With StepAhead each worker has a scale of its own, and one that overflows takes part in the exchange alone."""
    @functools.wraps(maybe_step)
    def wrapped(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        reducer = reducer_of(optimizer)
        if isinstance(reducer, StepAheadReducer) and any(
                found.item() for found in optimizer_state["found_inf_per_device"].values()):
            reducer.skip()
            return None
        return maybe_step(self, optimizer, optimizer_state, *args, **kwargs)
    return wrapped


def _adopt_scale(scale: float, flat: FlatReducer[Any]) -> None:
    """The first step's residual was taken before its scaler was known."""
    if flat.residual_scale is None:
        flat.residual_scale = scale


def _require_synchronized(optimizer: Any) -> None:
    reducer = gradient_reducer_of(optimizer)
    assert reducer is not None
    reducer.check_scaler()
    if not optimizer._synchronized:
        raise PluginError(NOT_SYNCHRONIZED)


def _require_averages(optimizer: Any) -> None:
    """With StepAhead, where the ranks of a host take the same steps."""
    reducer = reducer_of(optimizer)
    if isinstance(reducer, StepAheadReducer) and reducer.averages and not optimizer._synchronized:
        raise PluginError(NOT_SYNCHRONIZED)
