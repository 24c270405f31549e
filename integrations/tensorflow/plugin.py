"""Where the plugin meets horovod.tensorflow: the few names of Horovod that are wrapped, and nothing else.

Tapes, optimizers and Horovod's Keras all ask `_make_allreduce_grads_fn` for what reduces their gradients.
Every wrapper leaves other compressions alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import horovod
import horovod._keras as stock_keras
import horovod._keras.callbacks as stock_callbacks
import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.partial.options import Partial
from horovod_oktopk.partial.reducer import end_before
from horovod_oktopk.reducer.checks import check_arguments, check_horovod, refuse_join
from horovod_oktopk.schemes.inner import as_options
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.step_ahead.options import StepAhead
from horovod_oktopk.step_ahead.reducer import finish_before
from horovod_oktopk.tensorflow import amp, legacy_step_ahead
from horovod_oktopk.tensorflow.local_step import normalizes_gradients
from horovod_oktopk.tensorflow.models import check_optimizer
from horovod_oktopk.tensorflow.reducer import refuse_replicas
from horovod_oktopk.tensorflow.registry import (
    TapeReductions,
    gradient_reducer_for,
    gradient_reducers_of,
    in_use,
    reducers_of,
    refuse_overwritten,
    targets_of,
    tensor_of,
    variables_of,
)
from horovod_oktopk.tensorflow.step_ahead import OwnSteps
from horovod_oktopk.tensorflow.versions import KERAS, KERAS_3
from horovod_oktopk.transport.mpi.ending import before_shutdown
from horovod_oktopk.transport.tracing import show_phases

logger = logging.getLogger("horovod_oktopk")

_MAKE = ["name", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "gradient_predivide_factor",
         "groups", "process_set"]
_GRADIENT = ["self", "target", "sources", "output_gradients", "use_generic_names"]


def install() -> None:
    """Wraps Horovod's names; once. Raises PluginError where this Horovod is not the one that is known."""
    if getattr(hvd, "_oktopk_installed", False):
        return
    tape = hvd._DistributedGradientTape
    check_horovod(horovod.__version__, {hvd._make_allreduce_grads_fn: _MAKE, tape.gradient: _GRADIENT,
                                        tape.register_local_source: ["self", "source"]})
    hvd._make_allreduce_grads_fn = _wrap_make(hvd._make_allreduce_grads_fn)
    hvd.DistributedOptimizer = _wrap_optimizer(hvd.DistributedOptimizer)
    tape.gradient = _wrap_gradient(tape.gradient)
    tape.register_local_source = _wrap_source(tape.register_local_source)
    stock_keras.create_distributed_optimizer = _wrap_create(stock_keras.create_distributed_optimizer)
    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES  # whatever name a program calls, this is what is called in the end
    library.horovod_shutdown = end_before(finish_before(before_shutdown(library.horovod_shutdown)))
    hvd.join = hvd.mpi_ops.join = refuse_join(in_use, hvd.join)
    if not KERAS_3:
        legacy_step_ahead.install(stock_callbacks.BroadcastGlobalVariablesCallbackImpl)
    show_phases(tf.profiler.experimental.Trace)
    hvd._oktopk_installed = True


def step_report(target: Any) -> StepReport | None:
    """What the last reduction did on this rank.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.

    Returns:
        The report of the last step; None before the first. If there are several reductions or optimizers, the report
        of the one that has taken most steps.

    Raises:
        PluginError: The optimizer was not made with `compression=OkTopk(...)`.

    Examples:
        >>> report = step_report(model)
        >>> print(report.bytes_sent, report.seconds)
    """
    if not gradient_reducers_of(target) and not variables_of(target):
        raise PluginError(f"{target!r} was not made with compression=OkTopk(...), so it has no step report")
    reports = (reducer.flat.last_report for reducer in reducers_of(target))
    return max((report for report in reports if report), key=attrgetter("step"), default=None)


def set_density(target: Any, density: float | None) -> None:
    """Selects another share of the elements, from the next step on.

    All ranks must set it before the same step.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.
        density: the share, in (0, 1]; None: that of the options again.

    Raises:
        PluginError: Nothing was made with `compression=OkTopk(...)`.
        OptionError: The density is not allowed.

    Examples:
        >>> set_density(model, 0.05)
    """
    changed: list[Any] = [*gradient_reducers_of(target)]
    changed = changed or [reducer.flat for reducer in reducers_of(target)]
    if not changed:
        raise PluginError(f"{target!r} has no reduction made with compression=OkTopk(...), or none yet")
    for each in changed:
        each.set_density(density)


def synchronize_replicas(*targets: Any) -> None:
    """Makes the replicas of a `Partial` optimizer equal.

    It is called on all ranks together, outside of any tf.function: before evaluation, checkpoints and any collective
    of your own, and after the last step. A rank that is here serves the others' rounds until all are. Without
    `Partial` it does nothing.

    Args:
        *targets: such optimizers, or their models, or lists of these.

    Raises:
        PluginError: A target has no variables.

    Examples:
        >>> synchronize_replicas(model)
    """
    for each in dict.fromkeys(each for target in targets_of("synchronize_replicas", *targets)
                              for each in gradient_reducers_of(target)):
        each.synchronize_replicas()


def _wrap_make(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments
        options = as_options(asked["compression"])
        if options is None:
            return make(*args, **kwargs)
        refuse_replicas()
        if isinstance(options, Partial):
            raise PluginError("Partial applies several updates in a step, or none: in TensorFlow it works under "
                              "Keras 3 alone, in horovod_oktopk.tensorflow.keras.DistributedOptimizer")
        if os.environ.get("HOROVOD_AUTOTUNE") == "1":
            logger.warning("HOROVOD_AUTOTUNE tunes Horovod's own traffic, and has no effect on OkTopk")
        if isinstance(options, StepAhead):
            return _own_steps(options, asked)
        sparse = make(**{**asked, "compression": hvd.Compression.none, "groups": None})
        return gradient_reducer_for(asked["name"], options, asked["op"], asked["process_set"],
                                    asked["sparse_as_dense"], sparse)

    return wrapped


def _own_steps(options: StepAhead, asked: Mapping[str, Any]) -> OwnSteps:
    if "Tape" in asked["name"]:
        raise PluginError("a tape has no step to take, and StepAhead reduces what a step did: use "
                          "hvd.DistributedOptimizer around a Keras optimizer, or OkTopk with a tape")
    return OwnSteps(options, asked["op"], asked["process_set"])


def _wrap_optimizer(make: Callable[..., Any]) -> Callable[..., Any]:
    """hvd.DistributedOptimizer, which does not hand op and groups on to Keras optimizers."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments
        options = as_options(asked.get("compression", hvd.Compression.none))
        if options is None:
            return make(*args, **kwargs)
        import horovod.tensorflow.keras as hvd_keras
        check_arguments(hvd, asked.get("op", hvd.Average))
        asked.pop("use_locking", None)
        return hvd_keras.DistributedOptimizer(**asked)

    return wrapped


def _wrap_gradient(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """A tape's gradient, which does not know Keras 3's variables."""
    @functools.wraps(gradient)
    def wrapped(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._allreduce_grads, TapeReductions):
            return gradient(self, target, sources, *args, **kwargs)
        refuse_overwritten(sources)
        with amp.gradients_of(target):
            return gradient(self, target, [tensor_of(source) for source in sources], *args, **kwargs)

    return wrapped


def _wrap_source(register: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(register)
    def wrapped(self: Any, source: Any) -> None:
        register(self, tensor_of(source))

    return wrapped


def _wrap_create(create: Callable[..., Any]) -> Callable[..., Any]:
    """What makes Horovod's Keras optimizers: Keras 3 would never call them."""
    signature = inspect.signature(create)

    @functools.wraps(create)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments
        options = as_options(asked.get("compression", hvd.Compression.none))
        if options is None:
            return create(*args, **kwargs)
        if not isinstance(asked["optimizer"], tf.keras.optimizers.Optimizer):
            raise PluginError(f"expected an optimizer of {KERAS}; got {asked['optimizer']!r}. Those of "
                              "tf.compat.v1.train and tf.keras.optimizers.legacy are not supported: use "
                              "tf.keras.optimizers.SGD and its like, in eager mode or in a tf.function")
        if KERAS_3:
            raise PluginError(f"{KERAS} does not call Horovod's optimizer, and ranks would train apart. Use "
                              "horovod_oktopk.tensorflow.keras.DistributedOptimizer, which is made for it, or "
                              "tf-keras (TF_USE_LEGACY_KERAS=1)")
        check_optimizer(asked["optimizer"], options)
        if isinstance(options, StepAhead):
            asked["optimizer"] = legacy_step_ahead.taking_own_steps(asked["optimizer"])
        optimizer = create(*call.args, **call.kwargs)
        if isinstance(options, StepAhead):
            optimizer._allreduce_grads.normalizes = normalizes_gradients(optimizer)
        optimizer._compute_gradients = _wrap_compute(optimizer._compute_gradients)
        return optimizer

    return wrapped


def _wrap_compute(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of Horovod's Keras optimizers, which stumble over no variable at all."""
    @functools.wraps(compute)
    def wrapped(loss: Any, var_list: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(var_list, list | tuple) and not var_list:
            raise PluginError("the model has no trainable variable, so there is nothing to reduce and to train")
        with amp.gradients_of(loss):
            return compute(loss, var_list, *args, **kwargs)

    return wrapped
