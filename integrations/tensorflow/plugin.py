"""Where the plugin meets horovod.tensorflow: the few names of Horovod that are wrapped, and nothing else.

Tapes, optimizers and Horovod's Keras all ask `_make_allreduce_grads_fn` for what reduces their gradients.
Every wrapper leaves other compressions alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import horovod
import horovod._keras as stock_keras
import horovod.tensorflow as hvd

import tensorflow as tf

from ..errors import PluginError
from ..partial.options import Partial, as_options
from ..partial.reducer import end_before, in_turn
from ..reducer.checks import check_arguments, check_horovod, refuse_join
from ..schemes.report import StepReport
from .registry import (
    GradientReducer,
    gradient_reducer_for,
    gradient_reducer_of,
    in_use,
    reducers_of,
    tensor_of,
    variables_of,
)
from .versions import KERAS, KERAS_3

logger = logging.getLogger("horovod_oktopk")

_MAKE = ["name", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "gradient_predivide_factor",
         "groups", "process_set"]
_GRADIENT = ["self", "target", "sources", "output_gradients", "use_generic_names"]


def install() -> None:
    """Wraps Horovod's names; once. Raises PluginError where this Horovod is not the one that is known."""
    if getattr(hvd, "_oktopk_installed", False):
        return
    tape, adasum = hvd._DistributedGradientTape, hvd._DistributedAdasumOptimizer
    check_horovod(horovod.__version__, {hvd._make_allreduce_grads_fn: _MAKE, tape.gradient: _GRADIENT,
                                            tape.register_local_source: ["self", "source"]})
    hvd._make_allreduce_grads_fn = _wrap_make(hvd._make_allreduce_grads_fn)
    hvd.DistributedOptimizer = _wrap_optimizer(hvd.DistributedOptimizer)
    tape.gradient = _wrap_gradient(tape.gradient)
    tape.register_local_source = _wrap_source(tape.register_local_source)
    adasum.__init__ = _wrap_adasum(adasum.__init__)
    stock_keras.create_distributed_optimizer = _wrap_create(stock_keras.create_distributed_optimizer)
    hvd.shutdown = hvd.mpi_ops.shutdown = end_before(hvd.shutdown)
    hvd.join = hvd.mpi_ops.join = refuse_join(in_use, hvd.join)
    hvd._oktopk_installed = True


def step_report(target: Any) -> StepReport | None:
    """What the last reduction did on this rank; None before the first.

    target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.
    Where it has several reductions, the report is of the one that has taken most steps.
    Raises PluginError for an optimizer that was not made with `compression=OkTopk(...)`.
    """
    if gradient_reducer_of(target) is None and not variables_of(target):
        raise PluginError(f"{target!r} was not made with compression=OkTopk(...), so it has no step report")
    reports = (reducer.flat.last_report for reducer in reducers_of(target))
    return max((report for report in reports if report), key=attrgetter("step"), default=None)


def set_density(target: Any, density: float) -> None:
    """From the next step on, another fraction of the elements is selected; see `step_report` for the target.

    All ranks must set it before the same step. Raises PluginError where nothing was made with
    `compression=OkTopk(...)`, OptionError where the density is not allowed, or k was given.
    """
    gradient_reducer = gradient_reducer_of(target)
    changed: list[Any] = [gradient_reducer] if gradient_reducer else [reducer.flat for reducer in reducers_of(target)]
    if not changed:
        raise PluginError(f"{target!r} has no reduction made with compression=OkTopk(...), or none yet")
    for each in changed:
        each.set_density(density)


def synchronize_replicas(*targets: Any) -> None:
    """Makes the replicas of `Partial` optimizers equal; called on all ranks together, outside of any tf.function.

    targets: all such optimizers, or their models. A rank that is here serves the others' rounds until all are. Before
    evaluation, checkpoints, any collective of your own, and after the last step. Without `Partial` it does nothing.
    """
    found = [each for each in map(gradient_reducer_of, targets) if each is not None]
    in_turn([each.synchronize_replicas() for each in found])
    for each in found:
        each.after_synchronizing()


def _wrap_make(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments
        options = as_options(asked["compression"])
        if options is None:
            return make(*args, **kwargs)
        if isinstance(options, Partial):
            raise PluginError("Partial applies several updates in a step, or none: in TensorFlow it works under "
                              "Keras 3 alone, in horovod_oktopk.tensorflow.keras.DistributedOptimizer")
        if os.environ.get("HOROVOD_AUTOTUNE") == "1":
            logger.warning("HOROVOD_AUTOTUNE tunes Horovod's own traffic, and has no effect on OkTopk")
        sparse = make(**{**asked, "compression": hvd.Compression.none, "groups": None})
        return gradient_reducer_for(asked["name"], options, asked["op"], asked["process_set"],
                                    asked["sparse_as_dense"], sparse)

    return wrapped


def _wrap_optimizer(make: Callable[..., Any]) -> Callable[..., Any]:
    """hvd.DistributedOptimizer, which does not hand op and groups on to Keras optimizers."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments
        if as_options(asked.get("compression")) is None or isinstance(asked["optimizer"], hvd._LegacyOptimizer):
            return make(*args, **kwargs)
        import horovod.tensorflow.keras as hvd_keras
        check_arguments(hvd, asked.get("op", hvd.Average), asked.get("process_set", hvd.global_process_set))
        asked.pop("use_locking", None)
        return hvd_keras.DistributedOptimizer(**asked)

    return wrapped


def _wrap_gradient(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """A tape's gradient, which does not know Keras 3's variables."""
    @functools.wraps(gradient)
    def wrapped(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._allreduce_grads, GradientReducer):
            sources = [tensor_of(source) for source in sources]
        return gradient(self, target, sources, *args, **kwargs)

    return wrapped


def _wrap_source(register: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(register)
    def wrapped(self: Any, source: Any) -> None:
        register(self, tensor_of(source))

    return wrapped


def _wrap_adasum(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if as_options(signature.bind(self, *args, **kwargs).arguments.get("compression")) is not None:
            check_arguments(hvd, hvd.Adasum, hvd.global_process_set)
        init(self, *args, **kwargs)

    return wrapped


def _wrap_create(create: Callable[..., Any]) -> Callable[..., Any]:
    """What makes Horovod's Keras optimizers: Keras 3 would never call them."""
    signature = inspect.signature(create)

    @functools.wraps(create)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments
        if as_options(asked["compression"]) is None:
            return create(*args, **kwargs)
        if KERAS_3 and isinstance(asked["optimizer"], tf.keras.optimizers.Optimizer):
            raise PluginError(f"{KERAS} does not call Horovod's optimizer, and ranks would train apart. Use "
                              "horovod_oktopk.tensorflow.keras.DistributedOptimizer, which is made for it, or "
                              "tf-keras (TF_USE_LEGACY_KERAS=1)")
        optimizer = create(*args, **kwargs)
        optimizer._compute_gradients = _wrap_compute(optimizer._compute_gradients)
        return optimizer

    return wrapped


def _wrap_compute(compute: Callable[..., Any]) -> Callable[..., Any]:
    """What Horovod's Keras optimizers do with no variable at all is to stumble over it."""
    @functools.wraps(compute)
    def wrapped(loss: Any, var_list: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(var_list, list | tuple) and not var_list:
            raise PluginError("the model has no trainable variable, so there is nothing to reduce and to train")
        return compute(loss, var_list, *args, **kwargs)

    return wrapped
