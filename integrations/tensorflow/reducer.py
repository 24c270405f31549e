"""One reduction: gradient tensors → flat accumulators → sparse updates → gradient tensors.

All dense gradients go through one tf.numpy_function, so that each rank communicates in one place and in one order,
whatever TensorFlow runs side by side.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from numpy.typing import NDArray
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod_oktopk.errors import PluginError, TransportError
from horovod_oktopk.reducer.flat import FlatReducer
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.tensorflow import amp
from horovod_oktopk.tensorflow.accumulator import LendingAccumulator, new_memory
from horovod_oktopk.tensorflow.layout import TensorLayout
from horovod_oktopk.tensorflow.transport import ranks_of

logger = logging.getLogger("horovod_oktopk")

Array = NDArray[Any]
Signature = tuple[str, ...]
Step = Callable[..., list[Array]]
"""From the values of tensors to those of others."""
T = TypeVar("T")

GONE = ("a graph reduces gradients for an optimizer, or for variables of a tape, that are gone: keep the optimizer "
        "and the model for as long as the function that was traced with them is called")


class Reducer:
    """Reduces the gradients of one list of variables; on every rank of the process set."""

    def __init__(self, options: Scheme, op: Any, process_set: Any, variables: Sequence[Any], gradients: Sequence[Any],
                 ) -> None:
        self.signature = describe(variables, gradients)
        self._asked_density = options.density
        layout = TensorLayout((name_of(v), tuple(v.shape), g.dtype.name)
                              for v, g in zip(variables, gradients, strict=True) if is_dense(g))
        self.flat: FlatReducer[TensorLayout] = self._make_flat(options, op == hvd.Average, layout, process_set)
        self.before_step: Callable[[FlatReducer[TensorLayout]], None] | None = None
        """Called once, on all ranks, when the next step is taken."""

    def _make_flat(self, options: Scheme, average: bool, layout: TensorLayout, process_set: Any,
                   ) -> FlatReducer[TensorLayout]:
        return FlatReducer(options, average, layout, LendingAccumulator, ranks_of(process_set), self.signature)

    def reduce(self, gradients: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices] = (),
               density: float | None = None) -> list[tf.Tensor]:
        """The reduced dense gradients; all NaN where one is not finite on some rank, or one of the slices, which go
        another way. density: from here on, where the caller asks for another than at the step before."""
        scale = amp.scale_of_gradients()
        scale = tf.constant(0.0) if scale is None else tf.cast(scale, tf.float32)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each.values)) for each in slices] or [True])
        return call(partial(weakly(self._reduce), density), [scale, finite, *gradients],
                    [g.dtype for g in gradients], [g.shape for g in gradients])

    def refuse(self, gradients: Sequence[tf.Tensor], signature: Signature, message: str) -> list[tf.Tensor]:
        """For a step that cannot be taken: it raises PluginError, on ranks that do take it AgreementError."""
        step = partial(weakly(self._refuse), signature, message)
        return call(step, [], [g.dtype for g in gradients], [g.shape for g in gradients])

    def _refuse(self, signature: Signature, message: str, *_: Array) -> list[Array]:
        self.flat.refuse(signature, message)

    def _reduce(self, density: float | None, scale: Array, slices_finite: Array, *gradients: Array) -> list[Array]:
        if density is not None and density != self._asked_density:  # else `set_density` holds
            self.flat.set_density(density)
            self._asked_density = density
        if self.before_step is not None:
            action, self.before_step = self.before_step, None
            action(self.flat)
        layout, accumulator = self.flat.layout, self.flat.accumulator
        update = self.flat.reduce_pieces(layout.pieces(gradients), float(scale) or None,
                                         others_finite=bool(slices_finite))
        with self.flat.writing():
            return layout.write(update, accumulator.memory_for if isinstance(accumulator, LendingAccumulator)
                                else partial(new_memory, layout))


def call(step: Step, inputs: list[tf.Tensor], dtypes: list[tf.DType],
         shapes: Sequence[tf.TensorShape] | None = None) -> list[tf.Tensor]:
    """Runs the step on the tensors' values, now or when the graph runs."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(output) for output in step(*map(np.asarray, inputs))]
    outputs = tf.numpy_function(partial(guarded, step), inputs, dtypes, name="HorovodAllreduce_oktopk")
    if not dtypes:  # TensorFlow gives the operation itself
        return []
    for output, shape in zip(outputs, shapes or (), strict=False):
        output.set_shape(shape)
    return list(outputs)


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """An object's method, for a graph: it does not keep the object, as a graph does not keep its variables either.

    TensorFlow keeps what a tf.function calls, in a graph that it never drops. Raises PluginError where the object is
    gone.
    """
    kept = weakref.WeakMethod(method)

    def call_it(*inputs: Any) -> T:
        present = kept()
        if present is None:
            raise PluginError(GONE)
        return present(*inputs)

    return call_it


def guarded(step: Callable[..., T], *inputs: Array) -> T:
    """The step inside a graph; its errors, as TensorFlow passes them on, and as a line of the log by themselves.

    Elastic training takes up again after an UnknownError that names HorovodAllreduce, and takes any
    other for success: so failed communication becomes the one, and all else an InvalidArgumentError.
    """
    try:
        return step(*inputs)
    except Exception as error:
        _log_once(f"{type(error).__name__}: {' '.join(str(error).split())}")
        if isinstance(error, HorovodInternalError | TransportError):
            raise RuntimeError(f"HorovodAllreduce failed: {error}") from error
        raise ValueError(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _log_once(text: str) -> None:
    """TensorFlow puts the names of its graph and stacks around an error: there it is hard to find."""
    logger.error("%s", text)


def describe(variables: Sequence[Any], gradients: Sequence[Any]) -> Signature:
    """One line for each variable: what must be the same on all ranks, and at all steps."""
    return tuple(f"parameter {name_of(v)}: {_kind(v, g)}" for v, g in zip(variables, gradients, strict=True))


def name_of(variable: Any) -> str:
    """A name that is the same on all ranks: Keras 3's path, or TensorFlow's name."""
    return str(getattr(variable, "path", None) or variable.name)


def is_dense(gradient: Any) -> bool:
    """Whether it has a place in the flat vector."""
    return gradient is not None and not isinstance(gradient, tf.IndexedSlices)


def refuse_replicas() -> None:
    """Raises PluginError inside a strategy of tf.distribute with several replicas in one process."""
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1 or isinstance(strategy, tf.distribute.MirroredStrategy):
        raise PluginError(f"tf.distribute.{type(strategy).__name__} makes replicas inside a process, and Horovod "
                          "reduces between processes: start one process for each device (horovodrun -np), and leave "
                          "the strategy out")


def check_place() -> None:
    """Raises PluginError in a graph of TensorFlow 1, inside a function that XLA compiles, and inside a strategy of
    tf.distribute."""
    refuse_replicas()
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise PluginError("OkTopk works in TensorFlow 2's eager mode and in a tf.function; this is a graph of "
                          "TensorFlow 1: leave out tf.Graph() and disable_eager_execution(), and use a tape or an "
                          "optimizer of tf.keras.optimizers")
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise PluginError("OkTopk cannot work inside a function that XLA compiles, as no Horovod collective of its "
                          "kind can: use jit_compile=False for the training step (model.compile, tf.function)")


def _kind(variable: Any, gradient: Any) -> str:
    if gradient is None:
        return "no gradient"
    shape = f"shape {tuple(variable.shape)}, {gradient.dtype.name}"
    return shape if is_dense(gradient) else f"sparse gradient, {shape}"


