"""The PyTorch optimizers that cannot be distributed."""

from __future__ import annotations

from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.torch.registry import run_of

TWICE = ("hvd.DistributedOptimizer was given an optimizer that it has made itself, which is distributed already: "
         "give it the plain optimizer, once")
LBFGS = ("LBFGS cannot be used: it compares the gradients of several closures with how far its own moves have led. "
         "Here the gradients are either not reduced, or other ranks' moves come between: take another optimizer")


def check_plain(optimizer: Any) -> None:
    """Raise PluginError for an optimizer that is distributed already, by us or by stock Horovod."""
    if run_of(optimizer) is not None or hasattr(optimizer, "_allreduce_grad_async"):
        raise PluginError(TWICE)


def check_optimizer(optimizer: Any) -> None:
    """Raise PluginError for an optimizer whose steps cannot be distributed."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PluginError(LBFGS)
