"""Where the plugin meets horovod.torch: the few names of Horovod that are wrapped, and nothing else.

`hvd.DistributedOptimizer` copies the methods of `_DistributedOptimizer` when it is called, so wrapping
them here reaches every optimizer made later. Every wrapper leaves optimizers with another compression alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import horovod
import horovod.torch as hvd
import horovod.torch.optimizer as stock
from horovod.common.elastic import State

import torch

from ..errors import PluginError
from ..partial.options import Partial, as_options
from ..partial.reducer import end_before
from ..reducer.checks import check_arguments, check_horovod, refuse_join
from ..schemes.report import StepReport
from ..transport.connect import count_resets
from .partial import PartialReducer
from .reducer import Reducer
from .registry import reducer_of, register
from .state import attach_state

logger = logging.getLogger("horovod_oktopk")

_SIGNATURES = {
    "__init__": ["self", "params", "named_parameters", "compression", "backward_passes_per_step", "op",
                 "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set"],
    "_allreduce_grad_async": ["self", "p"],
    "_grouped_allreduce_grad_async": ["self", "ps"],
    "_sparse_allreduce_grad_async": ["self", "p", "name"],
    "_register_hooks": ["self"],
    "step": ["self", "closure"],
}

_live: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """Wraps Horovod's names; once. Raises PluginError where this Horovod is not the one that is known."""
    if getattr(stock, "_oktopk_installed", False):
        return
    cls = stock._DistributedOptimizer
    check_horovod(horovod.__version__, {getattr(cls, name): takes for name, takes in _SIGNATURES.items()})
    cls.__init__ = _wrap_init(cls.__init__)
    cls._allreduce_grad_async = _wrap_allreduce(cls._allreduce_grad_async)
    cls._grouped_allreduce_grad_async = _wrap_grouped_allreduce(cls._grouped_allreduce_grad_async)
    cls.step = _wrap_step(cls.step)
    adasum = stock._DistributedAdasumOptimizer
    adasum.__init__ = _wrap_adasum(adasum.__init__)
    stock.synchronize = _wrap_synchronize(stock.synchronize)
    hvd.join = hvd.mpi_ops.join = refuse_join(lambda: len(_live) > 0, hvd.join)
    hvd.shutdown = hvd.mpi_ops.shutdown = end_before(hvd.shutdown)
    count_resets(State)
    stock._oktopk_installed = True


def step_report(optimizer: torch.optim.Optimizer) -> StepReport | None:
    """What the last reduction of this optimizer did on this rank; None before the first.

    Raises PluginError for an optimizer that was not made with `compression=OkTopk(...)`.
    """
    return _reducer(optimizer).report


def set_density(optimizer: torch.optim.Optimizer, density: float) -> None:
    """From the next step on, another fraction of the elements is selected.

    All ranks must set it before the same step. Raises PluginError for an optimizer that was not made with
    `compression=OkTopk(...)`, OptionError where the density is not allowed, or k was given.
    """
    _reducer(optimizer).set_density(density)


def _reducer(optimizer: torch.optim.Optimizer) -> Reducer:
    reducer = reducer_of(optimizer)
    if reducer is None:
        raise PluginError(f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer(..., "
                          "compression=OkTopk(...))")
    return reducer


def _wrap_init(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        options = as_options(call.arguments["compression"])
        if options is None:
            init(*call.args, **call.kwargs)
            return
        call.arguments["compression"] = options
        call.apply_defaults()
        check_arguments(hvd, call.arguments["op"], call.arguments["process_set"])
        init(*call.args, **call.kwargs)
        reducer = PartialReducer(self, options) if isinstance(options, Partial) else Reducer(self, options)
        register(self, reducer)
        attach_state(self, reducer)
        if not self._grad_accs:  # alone, stock registers no hooks: the semantics should not depend on P
            self._register_hooks()
        _live.add(self)
        if os.environ.get("HOROVOD_AUTOTUNE") == "1":
            logger.warning("HOROVOD_AUTOTUNE tunes Horovod's own traffic, and has no effect on OkTopk")

    return wrapped


def _wrap_allreduce(allreduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(allreduce)
    def wrapped(self: Any, p: torch.Tensor) -> Any:
        reducer = reducer_of(self)
        if reducer is None:
            return allreduce(self, p)
        if p.grad is None:  # another rank may have computed it
            p.grad = reducer.no_gradient(p)
        if p.grad.is_sparse and not self.sparse_as_dense and not reducer.holds(p):
            reducer.exclude(p)
            handle, context = allreduce(self, p)  # stock's allgather of sparse gradients
            return reducer.after_reduction(handle), context
        return reducer.submit(p), None

    return wrapped


def _wrap_grouped_allreduce(allreduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(allreduce)
    def wrapped(self: Any, ps: tuple[torch.Tensor, ...]) -> Any:
        reducer = reducer_of(self)
        if reducer is None:
            return allreduce(self, ps)
        handles = [reducer.submit(p) for p in ps]
        return (lambda: [handle() for handle in handles]), [None] * len(ps)

    return wrapped


def _wrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        reducer = reducer_of(self)
        return reducer.step(closure) if isinstance(reducer, PartialReducer) else step(self, closure)

    return wrapped


def _wrap_synchronize(synchronize: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Horovod's module-level synchronize, which on the grouped path does not call handles."""
    @functools.wraps(synchronize)
    def wrapped(handle: Any) -> Any:
        return handle() if callable(handle) else synchronize(handle)

    return wrapped


def _wrap_adasum(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if as_options(signature.bind(self, *args, **kwargs).arguments["compression"]) is not None:
            check_arguments(hvd, hvd.Adasum, hvd.global_process_set)
        init(self, *args, **kwargs)

    return wrapped
