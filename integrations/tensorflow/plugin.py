"""The plugin in horovod.tensorflow: the factories that are wrapped, and what they make.

A factory hands our compressions to a class of the optimizer's or tape's own, and all others to stock, untouched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod
import horovod._keras as stock_keras
import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import State
from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.api import find_by
from horovod_oktopk.modes.ending import wrap_shutdown
from horovod_oktopk.modes.make import kind_of
from horovod_oktopk.modes.step_ahead.pace import DUAL_AVERAGERS, is_one_of
from horovod_oktopk.schemes import as_options
from horovod_oktopk.schemes.dense import means_dense
from horovod_oktopk.tensorflow import tape
from horovod_oktopk.tensorflow.operations import refuse_replicas
from horovod_oktopk.tensorflow.optimizer import distribute, is_distributed, wrap_scalers
from horovod_oktopk.tensorflow.private import KERAS, dense_allreduce
from horovod_oktopk.tensorflow.registry import in_use
from horovod_oktopk.tensorflow.state import ElasticVariables, owners_of
from horovod_oktopk.tensorflow.tensors import in_float32
from horovod_oktopk.tensorflow.variables import tensor_of
from horovod_oktopk.transport.counting import show_phases
from horovod_oktopk.transport.elastic import extend_elastic
from horovod_oktopk.transport.horovod import check_arguments, check_horovod, refuse_join


def install() -> None:
    """Wrap Horovod's factories; once. Raise PluginError if this Horovod is not the one that is known."""
    if getattr(hvd, "_oktopk_installed", False):
        return
    check_horovod(horovod.__version__, {})
    hvd.DistributedOptimizer = _wrap_factory(hvd.DistributedOptimizer, DistributedOptimizer)
    hvd.DistributedGradientTape = _wrap_tapes(hvd.DistributedGradientTape)
    stock_keras.create_distributed_optimizer = _wrap_factory(stock_keras.create_distributed_optimizer,
                                                             DistributedOptimizer, takes_dense=True)
    stock_keras.load_model = _wrap_load(stock_keras.load_model)
    wrap_shutdown(hvd)
    hvd.join = hvd.mpi_ops.join = refuse_join(in_use, hvd.join)
    wrap_scalers()
    show_phases(tf.profiler.experimental.Trace)
    find_by(owners_of, "models, layers, optimizers, variables")
    for cls in (TensorFlowKerasState, TensorFlowState):
        extend_elastic(State, cls, ElasticVariables)
    hvd._oktopk_installed = True


def DistributedOptimizer(optimizer: Any, name: str | None = None,  # noqa: ARG001, N802 (Horovod's names)
                         device_dense: str = "", device_sparse: str = "",
                         compression: Any = hvd.Compression.none, sparse_as_dense: bool = False,
                         gradient_predivide_factor: float = 1.0, op: Any = hvd.Average,
                         backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: Any = None, process_set: Any = hvd.global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """Make a Keras optimizer reduce gradients over the ranks, and return it: it is changed in place.

    A saved model, and a model's copy, hold the plain optimizer; see `load_model`. The arguments are those of
    horovod.tensorflow.keras.DistributedOptimizer.

    Args:
        optimizer: an optimizer of Keras 3 or tf-keras.
        name: is of no effect.
        device_dense: a device for Horovod's dense allreduce; with a compression of this package of no effect.
        device_sparse: a device for Horovod's exchange of sparse gradients; likewise.
        compression: `OkTopk(...)`, `StepAhead(...)`, `Partial(...)`, or one of Horovod's for a dense allreduce.
        sparse_as_dense: reduce sparse gradients (tf.IndexedSlices) as dense ones.
        gradient_predivide_factor: splits the division of a dense average; of no effect on this package's.
        op: `hvd.Average` or `hvd.Sum`.
        backward_passes_per_step: gradients of so many passes are added up locally before they are reduced. The
            optimizer's `iterations` count passes.
        average_aggregated_gradients: divide what was added up by the number of passes.
        num_groups: the same as groups, Horovod's older name.
        groups: how a dense allreduce fuses gradients; of no effect on this package's, which is one exchange.
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
    if is_distributed(optimizer):
        raise PluginError(f"{type(optimizer).__name__} is distributed already: wrap an optimizer once")
    options, own, dense = as_options(compression), optimizer, None
    if options is None:
        dense = in_float32(dense_allreduce(device_dense, device_sparse, compression, sparse_as_dense, op,
                                           gradient_predivide_factor, groups or num_groups or None, process_set))
    else:
        refuse_replicas()
        check_arguments(hvd, op, gradient_predivide_factor)
        own = check_optimizer(optimizer, options, backward_passes_per_step)
    distribute(own, options, dense, op, sparse_as_dense, backward_passes_per_step, average_aggregated_gradients,
               process_set, scale_local_gradients)
    return optimizer


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None,
               compression: Any = hvd.Compression.none, legacy_opts: bool = False, *, compile: bool = True,
               safe_mode: bool = True, **arguments: Any) -> Any:
    """Load a model as keras.models.load_model does, and make its optimizer distributed.

    Args:
        filepath: the saved model.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: as in keras.models.load_model.
        compression: as in `DistributedOptimizer`.
        legacy_opts: must be False: the optimizers of tf.keras.optimizers.legacy are not supported.
        compile: as in keras.models.load_model; False: the model comes without an optimizer.
        safe_mode: as in keras.models.load_model.
        **arguments: others of `DistributedOptimizer`.

    Returns:
        The model.

    Raises:
        PluginError: The model has no optimizer; or legacy_opts is True.

    Examples:
        >>> model = hvd_keras.load_model(
        ...     "model.keras", compression=hvd_keras.OkTopk(density=0.01))
    """
    if legacy_opts:
        raise PluginError("optimizers of tf.keras.optimizers.legacy are not supported: give legacy_opts=False")
    objects = {**{each.__name__: each for each in custom_optimizers or ()}, **(custom_objects or {})}
    model = tf.keras.models.load_model(filepath, custom_objects=objects, compile=compile, safe_mode=safe_mode)
    if not compile:
        return model
    if model.optimizer is None:
        raise PluginError(f"the model in {filepath} has no optimizer: compile it with a distributed one")
    DistributedOptimizer(model.optimizer, compression=compression, **arguments)
    model.jit_compile = False
    return model


def _wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function behind Horovod's load_model, which leaves optimizers of Keras 3 plain, without a word."""
    @functools.wraps(load)
    def wrapped(keras: Any, wrap_optimizer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = load(keras, wrap_optimizer, *args, **kwargs)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not is_distributed(optimizer):
            wrap_optimizer(lambda: optimizer)()  # which has the compression that was asked for
            model.jit_compile = False
        return model

    return wrapped


ADAFACTOR_EPSILON = 1e-12
"""The least epsilon_1 whose square is safe in float32."""


def check_optimizer(optimizer: Any, options: Any, passes: int) -> Any:
    """Return the optimizer that takes the steps: the given one, or the one inside that loss scaling has wrapped.

    Raise PluginError if the options' mode cannot serve it.
    """
    kind, scheme = kind_of(options), getattr(options, "scheme", options)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is not inner:
        kind.check("scaler")
    if passes != 1:
        kind.check("passes", passes=passes)
    if getattr(inner, "use_ema", False):
        kind.check("use_ema")
    if isinstance(inner, getattr(tf.keras.optimizers, "MultiOptimizer", ())):
        kind.check("several")
    if is_one_of(DUAL_AVERAGERS, type(inner)):
        kind.check("dual", name=type(inner).__name__)
    # Adafactor divides by the root of a row's mean square times a column's. In rows and columns of zeros these are
    # epsilon_1 (1e-30), whose square is 0 in float32: 0 / 0 makes all weights of the variable NaN.
    if (isinstance(inner, tf.keras.optimizers.Adafactor) and scheme.present_density != 1
            and inner.epsilon_1 < ADAFACTOR_EPSILON):
        kind.check("zero_rows", least=ADAFACTOR_EPSILON, got=inner.epsilon_1)
    return inner if kind.reads_memory else optimizer  # StepAhead's takes the steps, after the wrapper's check


def _wrap_factory(make: Callable[..., Any], ours: Callable[..., Any], takes_dense: bool = False,
                  ) -> Callable[..., Any]:
    """Wrap a factory of Horovod: `ours` gets its arguments by name, if the compression is ours.

    Those that `ours` does not take are of no effect on it. `Dense` is Horovod's, unless `ours` takes it, too: what
    Horovod makes of an optimizer of Keras 3 reduces nothing.
    """
    signature, taken = inspect.signature(make), inspect.signature(ours).parameters

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        asked = call.arguments
        if as_options(asked["compression"]) is not None:
            check_arguments(hvd, asked["op"], asked["gradient_predivide_factor"])
        elif not (takes_dense and means_dense(asked["compression"])):
            return make(*args, **kwargs)
        return ours(**{name: value for name, value in asked.items() if name in taken})

    return wrapped


def _wrap_tapes(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Horovod's factory of tapes. `Dense` has its function in a tape of ours, as its own fails under Keras 3."""
    signature, distributed = inspect.signature(make), _wrap_factory(make, tape.distribute)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments
        if not means_dense(asked.get("compression")):
            return distributed(*args, **kwargs)
        asked["compression"] = hvd.Compression.none  # Horovod keeps a function for each, and each Dense() is another
        if isinstance(asked.get("groups"), list):
            asked["groups"] = [list(map(tensor_of, group)) for group in asked["groups"]]
        stock = make(*call.args, **call.kwargs)
        return tape.view_of(asked["gradtape"], in_float32(stock._allreduce_grads),
                            stock.process_set if stock.scale_local_gradients else None, trains_densely=True)

    return wrapped
