"""The plugin's place in horovod.torch: the few names that are wrapped, and nothing else.

| name | why |
|---|---|
| `DistributedOptimizer`, of `horovod.torch` and `horovod.torch.optimizer` | hands our compressions to `distribute` |
| `hvd.join`, in `horovod.torch` and its `mpi_ops` | refused while a sparse compression is in use |
| `horovod_shutdown` of Horovod's library | rounds, exchanges and the watchdog end before it |
| `State.__init__` of Horovod's elastic states | gives a TorchState a class of its own (state.py) |
| `torch.amp.GradScaler.unscale_` | amp.py |
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod
import horovod.torch as hvd
import horovod.torch.optimizer as stock
import torch
from horovod.common.elastic import State
from horovod.torch.elastic.state import TorchState

from horovod_oktopk.modes.shutdown import wrap_shutdown
from horovod_oktopk.schemes import as_options
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.torch.optimizer import distribute, hand_over
from horovod_oktopk.torch.private import library, span
from horovod_oktopk.torch.refusals import check_optimizer, check_plain
from horovod_oktopk.torch.registry import is_in_use, own_run_of
from horovod_oktopk.torch.state import ElasticTorchState, attach_state
from horovod_oktopk.transport.counting import show_phases
from horovod_oktopk.transport.horovod import check_arguments, check_horovod, extend_elastic, refuse_join

logger = logging.getLogger("horovod_oktopk")

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
    extend_elastic(State, TorchState, ElasticTorchState)
    show_phases(span)
    stock._oktopk_installed = True


def step_report(optimizer: torch.optim.Optimizer) -> StepReport | None:
    """Return what the last reduction of an optimizer did on this rank.

    Args:
        optimizer: made with `compression=OkTopk(...)`, or another scheme of this package.

    Returns:
        The report of the last step; None before the first.

    Raises:
        PluginError: The optimizer was not made with `compression=OkTopk(...)`.

    Examples:
        >>> report = step_report(optimizer)
        >>> print(report.bytes_sent, report.seconds)
    """
    mode = own_run_of(optimizer).mode
    return None if mode is None else mode.report


def set_density(optimizer: torch.optim.Optimizer, density: float | None) -> None:
    """Select another share of the elements, from the next step on.

    All ranks must set it before the same step.

    Args:
        optimizer: made with `compression=OkTopk(...)`, or another scheme of this package.
        density: the share, in (0, 1]; None: that of the options again.

    Raises:
        PluginError: The optimizer was not made with `compression=OkTopk(...)`.
        OptionError: The density is not allowed.

    Examples:
        >>> set_density(optimizer, 0.05)
    """
    own_run_of(optimizer).set_density(density)


def _wrap_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        optimizer, options = given["optimizer"], as_options(given["compression"])
        check_plain(optimizer)
        if options is None:
            made = factory(*args, **kwargs)
            hand_over([p for group in made.param_groups for p in group["params"]])
            return made
        check_arguments(hvd, given["op"], given["gradient_predivide_factor"])
        check_optimizer(optimizer)
        if given["backward_passes_per_step"] <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        distribute(optimizer, options, _names(optimizer, given["named_parameters"]), given["op"],
                   given["sparse_as_dense"], given["process_set"])
        attach_state(optimizer)
        if os.environ.get("HOROVOD_AUTOTUNE") == "1":
            logger.warning("HOROVOD_AUTOTUNE tunes Horovod's own traffic, and has no effect on OkTopk: unset it")
        return optimizer

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
    missing = sum(p not in names for _, p in parameters)
    if missing:
        raise ValueError(f"named_parameters was specified, but {missing} parameters of the optimizer were not named")
    return names
