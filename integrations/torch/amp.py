"""torch.amp.GradScaler: gradients are unscaled before anything is made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.torch.private import values_of
from horovod_oktopk.torch.registry import run_of

UNSCALE_FIRST = ("the gradients were reduced while they held the loss scale, which each rank has for itself. Write: "
                 "scaler.unscale_(optimizer); optimizer.synchronize(); with optimizer.skip_synchronize(): "
                 "scaler.step(optimizer); or scaler.step(optimizer) alone")


def install() -> None:
    """Wrap GradScaler.unscale_, once, to refuse an order in which scaled gradients were reduced."""
    cls = torch.amp.GradScaler
    if not hasattr(cls.unscale_, "_oktopk_installed"):
        cls.unscale_ = _wrap_unscale(cls.unscale_)  # type: ignore[method-assign]


def _wrap_unscale(unscale: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(unscale)
    def wrapped(self: Any, optimizer: Any) -> None:
        run = run_of(optimizer)
        if run is not None and run.is_reduced and self.is_enabled():
            raise PluginError(UNSCALE_FIRST)
        unscale(self, optimizer)

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    return wrapped


@contextmanager
def taken_off(optimizer: Any) -> Iterator[torch.Tensor | bool | None]:
    """Hide a scaler's attributes from the optimizer's own step.

    Yields the loss scale that gradients hold; True if they hold none, but a scaler takes the step; None without one.
    """
    found = {name: vars(optimizer).pop(name) for name in ("found_inf", "grad_scale") if name in vars(optimizer)}
    scale = found.get("grad_scale")
    yield (True if scale is None else scale) if "found_inf" in found else None
    vars(optimizer).update(found)  # GradScaler deletes them, but not after an error


def unscale(gradients: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Divide the gradients by a loss scale, in place; it is a power of two unless the user's is not."""
    inverse = 1 / float(scale)
    for gradient in gradients:
        values_of(gradient).mul_(inverse)
