"""The plugin in horovod.tensorflow: the factories that are wrapped, and what they make.

A factory hands our compressions to a class of the optimizer's or tape's own, and all others to stock, untouched.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import horovod
import horovod._keras as stock_keras
import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.api import find_by
from horovod_oktopk.modes.make import wrap_shutdown
from horovod_oktopk.schemes import as_options
from horovod_oktopk.tensorflow import tape
from horovod_oktopk.tensorflow.graph import refuse_replicas
from horovod_oktopk.tensorflow.optimizer import distribute, steps_of
from horovod_oktopk.tensorflow.private import KERAS, dense_allreduce, library
from horovod_oktopk.tensorflow.refusals import check_optimizer
from horovod_oktopk.tensorflow.registry import in_use, runs_of_tapes
from horovod_oktopk.tensorflow.shared import owners_of
from horovod_oktopk.tensorflow.variables import tensor_of
from horovod_oktopk.transport.counting import show_phases
from horovod_oktopk.transport.horovod import check_arguments, check_horovod, refuse_join

logger = logging.getLogger("horovod_oktopk")

TWICE = "is distributed already: wrap an optimizer once"
NO_TAPE = ("a tape has no step to take, and {name} acts at an optimizer's step: use hvd.DistributedOptimizer around "
           "a Keras optimizer, or OkTopk with a tape")


def install() -> None:
    """Wrap Horovod's factories; once. Raise PluginError if this Horovod is not the one that is known."""
    if getattr(hvd, "_oktopk_installed", False):
        return
    check_horovod(horovod.__version__, {})
    hvd.DistributedOptimizer = _wrap_optimizer(hvd.DistributedOptimizer)
    hvd.DistributedGradientTape = _wrap_tape(hvd.DistributedGradientTape)
    stock_keras.create_distributed_optimizer = _wrap_optimizer(stock_keras.create_distributed_optimizer)
    library().horovod_shutdown = wrap_shutdown(library().horovod_shutdown)
    hvd.join = hvd.mpi_ops.join = refuse_join(in_use, hvd.join)
    show_phases(tf.profiler.experimental.Trace)
    find_by(owners_of, "models, layers, optimizers, variables")
    hvd._oktopk_installed = True


def DistributedOptimizer(optimizer: Any, *, compression: Any = hvd.Compression.none,  # noqa: N802 (Horovod's name)
                         op: Any = hvd.Average, sparse_as_dense: bool = False, backward_passes_per_step: int = 1,
                         average_aggregated_gradients: bool = False, process_set: Any = hvd.global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """Make a Keras optimizer reduce gradients over the ranks, and return it: it is changed in place.

    A saved model, and a model's copy, hold the plain optimizer; see `load_model`. The arguments after `compression`
    are those of horovod.tensorflow.keras.DistributedOptimizer, which also has names, devices, groups and predivision.

    Args:
        optimizer: an optimizer of Keras 3 or tf-keras.
        compression: `OkTopk(...)`, `StepAhead(...)`, `Partial(...)`, or one of Horovod's for a dense allreduce.
        op: `hvd.Average` or `hvd.Sum`.
        sparse_as_dense: reduce sparse gradients (tf.IndexedSlices) as dense ones.
        backward_passes_per_step: gradients of so many passes are added up locally before they are reduced.
        average_aggregated_gradients: divide what was added up by the number of passes.
        process_set: the ranks that reduce together.
        scale_local_gradients: divide the gradients of variables that are not reduced by the number of ranks.

    Returns:
        The optimizer that was given.

    Raises:
        PluginError: It is no Keras optimizer, or is distributed already; or in a scope of tf.distribute.
        OptionError: The compression is none of these.

    Examples:
        >>> optimizer = hvd_keras.DistributedOptimizer(
        ...     keras.optimizers.SGD(0.1), compression=hvd_keras.OkTopk(density=0.01))
    """
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise PluginError(f"expected an optimizer of {KERAS}; got {optimizer!r}. Those of tf.compat.v1.train and "
                          "tf.keras.optimizers.legacy are not supported: use tf.keras.optimizers.SGD and its like, "
                          "in eager mode or in a tf.function")
    if steps_of(optimizer) is not None or hasattr(optimizer, "_allreduce_grads"):  # ours, or stock Horovod's
        raise PluginError(f"{type(optimizer).__name__} {TWICE}")
    options, own, reduce = as_options(compression), optimizer, None
    if options is None:
        make = dense_allreduce(compression, sparse_as_dense, op, process_set)

        def reduce(gradients: Any, variables: Any) -> list[Any]:
            return list(make(list(gradients), [tensor_of(variable) for variable in variables]))
    else:
        refuse_replicas()
        check_arguments(hvd, op)
        own = check_optimizer(optimizer, options, backward_passes_per_step)
        if os.environ.get("HOROVOD_AUTOTUNE") == "1":
            logger.warning("HOROVOD_AUTOTUNE tunes Horovod's own traffic, and has no effect on OkTopk: unset it")
    distribute(own, options, op, sparse_as_dense, backward_passes_per_step, average_aggregated_gradients, process_set,
               scale_local_gradients, reduce)
    return optimizer


_TAKEN = frozenset(inspect.signature(DistributedOptimizer).parameters)


def _wrap_optimizer(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory of optimizers. Its names, devices, groups and predivision are of no effect on ours."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        asked = call.arguments
        if as_options(asked["compression"]) is None:
            return make(*args, **kwargs)
        check_arguments(hvd, asked["op"], asked["gradient_predivide_factor"])
        return DistributedOptimizer(**{name: value for name, value in asked.items() if name in _TAKEN})

    return wrapped


def _wrap_tape(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        asked = call.arguments
        options = as_options(asked["compression"])
        if options is None:
            return make(*args, **kwargs)
        check_arguments(hvd, asked["op"], asked["gradient_predivide_factor"])
        refuse_replicas()
        if not hasattr(options, "density"):
            raise PluginError(NO_TAPE.format(name=type(options).__name__))
        runs = runs_of_tapes(options, asked["op"], asked["process_set"], asked["sparse_as_dense"])
        tape.distribute(asked["gradtape"], runs, options.density, asked["process_set"],
                        asked["scale_local_gradients"])
        return asked["gradtape"]

    return wrapped
