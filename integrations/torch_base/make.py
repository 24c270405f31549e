"""The making of a distributed optimizer: its checks, and what is changed in PyTorch for all of them."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.api import find_by
from horovod_oktopk.modes.make import kind_of
from horovod_oktopk.modes.step_ahead.pace import DUAL_AVERAGERS, is_one_of
from horovod_oktopk.torch_base.own_class import class_of, plain_class
from horovod_oktopk.torch_base.peers import MakePeers
from horovod_oktopk.torch_base.private import SCHEDULED, span
from horovod_oktopk.torch_base.registry import add, make_way, owners_of, run_of
from horovod_oktopk.torch_base.run import UNSCALE_FIRST
from horovod_oktopk.torch_base.runs import RUNS
from horovod_oktopk.torch_base.state import add_state, is_sharded
from horovod_oktopk.transport.counting import show_phases

TWICE = ("DistributedOptimizer was given an optimizer that it has made itself, which is distributed already: give it "
         "the plain optimizer, once")
LBFGS = ("LBFGS cannot be used: it compares the gradients of several closures with how far its own moves have led. "
         "Here the gradients are either not reduced, or other ranks' moves come between: take another optimizer")
CLOSURE = ("{name} cannot be used: its step() cannot go without a closure, or its work is in first_step() and "
           "second_step(), which exchange nothing, so that each rank would train for itself. Take another optimizer")
HOOKLESS = ("{name} cannot be distributed: it does not call Optimizer.__init__, so that PyTorch runs no hooks around "
            "its steps and states. If it is made of another optimizer, give it that one distributed, by OkTopk and "
            "not StepAhead: write {name}(DistributedOptimizer(inner optimizer, ...))")
PREPARED = ("an AcceleratedOptimizer only passes on what it is asked: call DistributedOptimizer before "
            "accelerator.prepare, or give it the optimizer inside, which is its attribute `optimizer`")
META = ("'{name}' is on the meta device, and has no values: give the model memory first, by "
        "model.to_empty(device=...) or by loading it, and make the optimizer of it after that")


@functools.cache  # once in a process
def install() -> None:
    """Have GradScaler, profilers and the functions between steps know distributed optimizers."""
    unscale = torch.amp.GradScaler.unscale_

    @functools.wraps(unscale)
    def wrapped(self: Any, optimizer: Any) -> None:
        run = run_of(optimizer)
        if run is not None and run.is_reduced and self.is_enabled():
            raise PluginError(UNSCALE_FIRST)
        unscale(self, optimizer)

    torch.amp.GradScaler.unscale_ = wrapped  # type: ignore[method-assign]
    show_phases(span)
    find_by(owners_of, "optimizers, models (torch.nn.Module)")


def make(optimizer: torch.optim.Optimizer, options: Any, named_parameters: Any, average: bool, sparse_as_dense: bool,
         make_peers: MakePeers, module: str) -> None:
    """Distribute the steps of a plain optimizer, which stays the same object; its class says it is of this module.

    Raise PluginError, or ValueError as stock Horovod does, for what cannot be distributed.
    """
    refuse_ours(optimizer)
    _refuse(optimizer, options)
    plain, names = plain_class(type(optimizer)), _names(optimizer, named_parameters)
    # What a scheduler or Accelerate has put on the object is its own step.
    local = vars(optimizer).get("step") or plain.step.__get__(optimizer)
    run = RUNS[kind_of(options)](optimizer, local, options, names, average, sparse_as_dense, make_peers)
    vars(optimizer).pop("step", None)
    optimizer.__class__ = class_of(plain, module, hasattr(local, SCHEDULED))
    make_way(run.parameters.all())
    add(optimizer, run)
    optimizer.register_state_dict_post_hook(add_state)


def refuse_ours(optimizer: Any) -> None:
    """Raise PluginError for an optimizer that is distributed already."""
    if run_of(optimizer) is not None:
        raise PluginError(TWICE)


def _refuse(optimizer: torch.optim.Optimizer, options: Any) -> None:
    """Raise PluginError for an optimizer whose work cannot be distributed by its step()."""
    plain = plain_class(type(optimizer))
    if plain.__name__ == "AcceleratedOptimizer":
        raise PluginError(PREPARED)
    if hasattr(plain, "eval") and hasattr(plain, "train"):
        kind_of(options).check("averaging", name=plain.__name__)
    if is_sharded(plain):
        kind_of(options).check("sharded", name=plain.__name__)
    if is_one_of(DUAL_AVERAGERS, plain):
        kind_of(options).check("dual", name=plain.__name__)
    try:
        optimizer.register_state_dict_post_hook(lambda *_: None).remove()  # the one that Lookahead of timm lacks
    except AttributeError:
        raise PluginError(HOOKLESS.format(name=plain.__name__)) from None
    if issubclass(plain, torch.optim.LBFGS):
        raise PluginError(LBFGS)
    closure = inspect.signature(plain.step).parameters.get("closure")
    if (closure is not None and closure.default is inspect.Parameter.empty) or (
            hasattr(plain, "first_step") and hasattr(plain, "second_step")):
        raise PluginError(CLOSURE.format(name=plain.__name__))


def _names(optimizer: torch.optim.Optimizer, given: Any) -> dict[torch.Tensor, str]:
    """Return the parameters' names, as stock Horovod makes and checks them. Raise ValueError as it does."""
    parameters = [(f"allreduce.noname.{i}.{j}", p) for i, group in enumerate(optimizer.param_groups)
                  for j, p in enumerate(group["params"])]
    named = parameters if given is None else list(given)
    if not all(isinstance(each, tuple) for each in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {p: name for name, p in named}
    empty = next((names.get(p, name) for name, p in parameters if p.is_meta), None)
    if empty is not None:
        raise PluginError(META.format(name=empty))
    missing = sum(p not in names for _, p in parameters)
    if missing:
        raise ValueError(f"named_parameters was specified, but {missing} parameters of the optimizer were not named")
    return names
