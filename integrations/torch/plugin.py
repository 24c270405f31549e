"""The plugin in horovod.torch: the few names that are wrapped (docs/architecture.md says why), and no others."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod
import horovod.torch as hvd
import horovod.torch.optimizer as stock
import torch
from horovod.common.elastic import State
from horovod.torch.elastic.state import TorchState

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.api import find_by
from horovod_oktopk.modes.make import kind_of, wrap_shutdown
from horovod_oktopk.schemes import as_options
from horovod_oktopk.torch.optimizer import UNSCALE_FIRST
from horovod_oktopk.torch.own_class import distribute, plain_class
from horovod_oktopk.torch.private import library, span
from horovod_oktopk.torch.registry import is_in_use, owners_of, run_of, suspend_others
from horovod_oktopk.torch.state import ElasticTorchState, attach_state
from horovod_oktopk.transport.counting import show_phases
from horovod_oktopk.transport.horovod import check_arguments, check_horovod, extend_elastic, refuse_join

TWICE = ("hvd.DistributedOptimizer was given an optimizer that it has made itself, which is distributed already: "
         "give it the plain optimizer, once")
LBFGS = ("LBFGS cannot be used: it compares the gradients of several closures with how far its own moves have led. "
         "Here the gradients are either not reduced, or other ranks' moves come between: take another optimizer")
CLOSURE = ("{name} cannot be used: its step() cannot go without a closure, or its work is in first_step() and "
           "second_step(), which exchange nothing, so that each rank would train for itself. Take another optimizer")
MOVES = ("{name} cannot be used with StepAhead: its eval() and train() move the parameters by a state that is each "
         "rank's own: use OkTopk alone, with which all ranks have the same state")
META = ("'{name}' is on the meta device, and has no values: give the model memory first, by "
        "model.to_empty(device=...) or by loading it, and make the optimizer of it after that")
_TAKES = ["optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
          "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set"]


def install() -> None:
    """Wrap Horovod's names, once. Raise PluginError if this Horovod is not the one that is known."""
    if hasattr(stock, "_oktopk_installed"):
        return
    check_horovod(horovod.__version__, {stock.DistributedOptimizer: _TAKES})
    hvd.DistributedOptimizer = stock.DistributedOptimizer = _wrap_factory(stock.DistributedOptimizer)
    hvd.join = hvd.mpi_ops.join = refuse_join(is_in_use, hvd.join)
    library().horovod_shutdown = wrap_shutdown(library().horovod_shutdown)
    torch.amp.GradScaler.unscale_ = _wrap_unscale(torch.amp.GradScaler.unscale_)  # type: ignore[method-assign]
    extend_elastic(State, TorchState, ElasticTorchState)
    show_phases(span)
    find_by(owners_of, "optimizers, models (torch.nn.Module)")
    stock._oktopk_installed = True


def _wrap_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        optimizer, options = given["optimizer"], as_options(given["compression"])
        if run_of(optimizer) is not None or hasattr(optimizer, "_allreduce_grad_async"):  # ours, or stock Horovod's
            raise PluginError(TWICE)
        if options is None:
            made = factory(*args, **kwargs)
            suspend_others([p for group in made.param_groups for p in group["params"]])
            return made
        check_arguments(hvd, given["op"], given["gradient_predivide_factor"])
        _refuse(optimizer, options)
        if given["backward_passes_per_step"] <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        distribute(optimizer, options, _names(optimizer, given["named_parameters"]), given["op"],
                   given["sparse_as_dense"], given["process_set"])
        attach_state(optimizer)
        return optimizer

    return wrapped


def _refuse(optimizer: torch.optim.Optimizer, options: Any) -> None:
    """Raise PluginError for an optimizer whose work cannot be distributed by its step()."""
    plain = plain_class(type(optimizer))
    if issubclass(plain, torch.optim.LBFGS):
        raise PluginError(LBFGS)
    closure = inspect.signature(plain.step).parameters.get("closure")
    if (closure is not None and closure.default is inspect.Parameter.empty) or (
            hasattr(plain, "first_step") and hasattr(plain, "second_step")):
        raise PluginError(CLOSURE.format(name=plain.__name__))
    if kind_of(options).reads_memory and hasattr(plain, "eval") and hasattr(plain, "train"):
        raise PluginError(MOVES.format(name=plain.__name__))


def _wrap_unscale(unscale: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(unscale)
    def wrapped(self: Any, optimizer: Any) -> None:
        run = run_of(optimizer)
        if run is not None and run.is_reduced and self.is_enabled():
            raise PluginError(UNSCALE_FIRST)
        unscale(self, optimizer)

    return wrapped


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
