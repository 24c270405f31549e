"""Where the plugin meets horovod.torch: the few names of Horovod that are wrapped, and nothing else.

`hvd.DistributedOptimizer` copies the methods of `_DistributedOptimizer` when it is called, so wrapping
them here reaches every optimizer made later. Every wrapper leaves optimizers with another compression alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import horovod
import horovod.torch as hvd
import horovod.torch.optimizer as stock
import torch
from horovod.common.elastic import State
from horovod.torch.elastic.state import TorchState

from horovod_oktopk.errors import PluginError
from horovod_oktopk.partial.options import Partial
from horovod_oktopk.partial.reducer import end_before
from horovod_oktopk.reducer.checks import check_arguments, check_horovod, refuse_join
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.schemes.inner import as_options
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.step_ahead.options import StepAhead
from horovod_oktopk.step_ahead.reducer import finish_before
from horovod_oktopk.torch import elastic, profiling
from horovod_oktopk.torch.partial import PartialReducer
from horovod_oktopk.torch.reducer import Reducer, forget_handles
from horovod_oktopk.torch.registry import AnyReducer, gradient_reducer_of, is_in_use, reducer_of, register
from horovod_oktopk.torch.state import attach_state
from horovod_oktopk.torch.step_ahead import StepAheadReducer, hand_over
from horovod_oktopk.transport.horovod import count_resets
from horovod_oktopk.transport.mpi.ending import before_shutdown
from horovod_oktopk.transport.tracing import show_phases

logger = logging.getLogger("horovod_oktopk")

_SIGNATURES = {
    "__init__": ["self", "params", "named_parameters", "compression", "backward_passes_per_step", "op",
                 "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set"],
    "_allreduce_grad_async": ["self", "p"],
    "_grouped_allreduce_grad_async": ["self", "ps"],
    "_sparse_allreduce_grad_async": ["self", "p", "name"],
    "_register_hooks": ["self"],
    "step": ["self", "closure"],
    "synchronize": ["self"],
}

TWICE = ("hvd.DistributedOptimizer was given an optimizer that it has made itself, which is distributed already: "
         "give it the plain optimizer, once")
LBFGS = ("LBFGS cannot be used: it compares the gradients of several closures with how far its own moves have led. "
         "Here the gradients are either not reduced, or other ranks' moves come between: take another optimizer")


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
    cls.synchronize = _wrap_optimizer_synchronize(cls.synchronize)
    adasum = stock._DistributedAdasumOptimizer
    adasum.__init__ = _wrap_adasum(adasum.__init__)
    stock.synchronize = _wrap_synchronize(stock.synchronize)
    hvd.join = hvd.mpi_ops.join = refuse_join(is_in_use, hvd.join)
    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES  # whatever name a program calls, this is what is called in the end
    library.horovod_shutdown = end_before(finish_before(before_shutdown(library.horovod_shutdown)))
    count_resets(State)
    elastic.install(TorchState)
    show_phases(profiling.span)
    stock._oktopk_installed = True


def step_report(optimizer: torch.optim.Optimizer) -> StepReport | None:
    """What the last reduction of an optimizer did on this rank.

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
    return _reducer(optimizer).report


def set_density(optimizer: torch.optim.Optimizer, density: float | None) -> None:
    """Selects another share of the elements, from the next step on.

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
    _reducer(optimizer).set_density(density)


def _reducer(optimizer: torch.optim.Optimizer) -> AnyReducer:
    reducer = reducer_of(optimizer)
    if reducer is None:
        raise PluginError(f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer(..., "
                          "compression=OkTopk(...))")
    return reducer


def _wrap_init(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_twice(self)
        call = signature.bind(self, *args, **kwargs)
        options = as_options(call.arguments["compression"])
        if options is None:
            init(*call.args, **call.kwargs)
            hand_over(self)
            return
        call.arguments["compression"] = options
        call.apply_defaults()
        check_arguments(hvd, call.arguments["op"])
        if isinstance(self, torch.optim.LBFGS):
            raise PluginError(LBFGS)
        if isinstance(options, StepAhead):
            if not options.scheme.hierarchical:
                self._register_hooks = lambda: None  # gradients stay the program's own
            call.arguments["compression"] = hvd.Compression.none
        init(*call.args, **call.kwargs)
        hand_over(self)
        reducer = _make_reducer(self, options)
        register(self, reducer)
        attach_state(self, reducer)
        reduces = isinstance(reducer, Reducer) and reducer.ranks.takes_part
        if reduces and not self._grad_accs:  # alone, stock registers no hooks, and reduces nothing
            _reduce_in_synchronize(self)
        if os.environ.get("HOROVOD_AUTOTUNE") == "1":
            logger.warning("HOROVOD_AUTOTUNE tunes Horovod's own traffic, and has no effect on OkTopk")

    return wrapped


def _refuse_twice(optimizer: Any) -> None:
    """Horovod makes a class of the optimizer's own: of a distributed one it would fail for want of arguments."""
    if sum("_allreduce_grad_async" in vars(cls) for cls in type(optimizer).__mro__) > 1:
        raise PluginError(TWICE)


def _make_reducer(optimizer: Any, options: Scheme | Partial | StepAhead) -> AnyReducer:
    """On a rank outside the process set the optimizer is local, as in stock: its reducer is never asked to reduce."""
    if isinstance(options, StepAhead):
        return StepAheadReducer(optimizer, options)
    if isinstance(options, Scheme):
        return Reducer(optimizer, options)
    if not optimizer.process_set.included():
        return Reducer(optimizer, options.scheme)
    return PartialReducer(optimizer, options)


def _reduce_in_synchronize(optimizer: Any) -> None:
    """One rank alone reduces as well, for the semantics not to depend on P. Without hooks, as in stock: any number of
    backward passes may come before a step."""
    optimizer._groups = None  # they change nothing
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    optimizer._requires_update.update(p for p in parameters if p.requires_grad)


def _is_alone(optimizer: Any) -> bool:
    """Whether StepAhead averages over hosts with one rank each; on all ranks together."""
    reducer = reducer_of(optimizer)
    return isinstance(reducer, StepAheadReducer) and not reducer.find_host()


def _as_it_is(output: Any) -> Callable[[], Any]:
    """A handle of what is reduced already."""
    return lambda: output


def _wrap_allreduce(allreduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(allreduce)
    def wrapped(self: Any, p: torch.Tensor) -> Any:
        reducer = gradient_reducer_of(self)
        if reducer is None:
            return (_as_it_is(p.grad), None) if _is_alone(self) else allreduce(self, p)
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
        reducer = gradient_reducer_of(self)
        if reducer is None:
            return (_as_it_is([p.grad for p in ps]), [None] * len(ps)) if _is_alone(self) else allreduce(self, ps)
        handles = [reducer.submit(p) for p in ps]
        return (lambda: [handle() for handle in handles]), [None] * len(ps)

    return wrapped


def _wrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        reducer = reducer_of(self)
        if isinstance(reducer, PartialReducer | StepAheadReducer):
            return reducer.step(closure)
        if reducer is None or closure is None or not self._should_synchronize:
            return step(self, closure)
        return _step_after(closure, self, step)

    return wrapped


def _step_after(closure: Callable[[], Any], optimizer: Any, step: Callable[..., Any]) -> Any:
    """Stock reduces first, and then has the closure compute new gradients, which would be applied as they are: the
    replicas would drift apart."""
    with torch.enable_grad():
        loss = closure()
    step(optimizer)
    return loss


def _wrap_optimizer_synchronize(synchronize: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's own: after an error its gradients are gone, and the next step begins anew."""
    @functools.wraps(synchronize)
    def wrapped(self: Any) -> None:
        reducer = reducer_of(self)
        if isinstance(reducer, StepAheadReducer):
            reducer.before_synchronize()
        try:
            synchronize(self)
        except Exception:
            if isinstance(reducer, Reducer):
                reducer.abandon_step()
            elif reducer is not None:
                forget_handles(self)
            raise

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
            check_arguments(hvd, hvd.Adasum)
        init(self, *args, **kwargs)

    return wrapped
