"""Python functions as TensorFlow operations: they run now, or whenever a graph runs, in the order of the program.

Each rank then communicates in one place and in one order, whatever TensorFlow runs side by side.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from numpy.typing import NDArray

from horovod_oktopk.errors import PluginError, TransportError
from horovod_oktopk.tensorflow.private import is_compiled_by_xla

logger = logging.getLogger("horovod_oktopk")

Array = NDArray[Any]
T = TypeVar("T")
NAME = "HorovodAllreduce_oktopk"
"""The operations' name, by which elastic training knows a failed collective."""
GONE = ("a graph reduces gradients for an optimizer, or for variables of a tape, that are gone: keep the optimizer "
        "and the model for as long as the function that was traced with them is called")


def call(function: Callable[..., Sequence[Array]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType] = (),
         shapes: Sequence[Any] = (), touched: Sequence[tf.Variable] = ()) -> list[tf.Tensor]:
    """Call a function of arrays with the tensors' values, now or when the graph runs; return its results as tensors.

    touched: variables that the function reads or writes; a graph runs it in order with whatever else touches them.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(result) for result in function(*map(np.asarray, inputs))]
    if touched:
        count = len(inputs)

        def run(*given: tf.Tensor) -> Sequence[Array]:
            return guarded(function, *map(np.asarray, given[:count]))

        results = tf.py_function(run, [*inputs, *(v.handle for v in touched)], list(dtypes), name=NAME)
    else:
        results = tf.numpy_function(partial(guarded, function), list(inputs), list(dtypes), name=NAME)
    if not dtypes:  # TensorFlow gives the operation itself
        return []
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def repeat(count: tf.Tensor, action: Callable[[tf.Tensor], object], at_most_once: bool) -> None:
    """Take an action `count` times, one after another, with the number of those before."""
    if tf.executing_eagerly():
        for number in range(int(count)):
            action(tf.constant(number))
    elif at_most_once:
        tf.cond(count > 0, lambda: _and_then(action(tf.constant(0)), tf.constant(0)), lambda: tf.constant(0))
    else:
        tf.while_loop(lambda i: i < count, lambda i: _and_then(action(i), i + 1), [tf.constant(0)],
                      parallel_iterations=1)


def _and_then(_: object, result: tf.Tensor) -> tf.Tensor:
    return result


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """Return an object's method for a graph, which must not keep the object alive, as it keeps no variable either.

    TensorFlow keeps what a tf.function calls, in a graph that it never drops. Raise PluginError if the object is
    gone.
    """
    kept = weakref.WeakMethod(method)

    def call_it(*inputs: Any) -> T:
        present = kept()
        if present is None:
            raise PluginError(GONE)
        return present(*inputs)

    return call_it


def guarded(function: Callable[..., T], *inputs: Array) -> T:
    """Call a function inside a graph. Raise its errors as TensorFlow passes them on, and log each in one line.

    Elastic training takes up again after an UnknownError that names HorovodAllreduce, and takes any
    other for success: so failed communication becomes the one, and all else an InvalidArgumentError.
    """
    try:
        return function(*inputs)
    except Exception as error:
        _log_once(f"{type(error).__name__}: {' '.join(str(error).split())}")
        if isinstance(error, HorovodInternalError | TransportError):
            raise RuntimeError(f"HorovodAllreduce failed: {error}") from error
        raise ValueError(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _log_once(text: str) -> None:
    """Log an error, which TensorFlow hides among the names of its graph and stacks."""
    logger.error("%s", text)


def refuse_replicas() -> None:
    """Raise PluginError inside a strategy of tf.distribute with several replicas in one process."""
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1 or isinstance(strategy, tf.distribute.MirroredStrategy):
        raise PluginError(f"tf.distribute.{type(strategy).__name__} makes replicas inside a process, and Horovod "
                          "reduces between processes: start one process for each device (horovodrun -np), and leave "
                          "the strategy out")


def check_place() -> None:
    """Raise PluginError in a graph of TensorFlow 1, in a function that XLA compiles, and in a strategy."""
    refuse_replicas()
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise PluginError("OkTopk works in TensorFlow 2's eager mode and in a tf.function; this is a graph of "
                          "TensorFlow 1: leave out tf.Graph() and disable_eager_execution(), and use a tape or an "
                          "optimizer of tf.keras.optimizers")
    if not tf.executing_eagerly() and is_compiled_by_xla():
        raise PluginError("OkTopk cannot work inside a function that XLA compiles, as no Horovod collective of its "
                          "kind can: give jit_compile=False to tf.function, and to model.compile in Keras, or give "
                          "model.fit the callback hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), which "
                          "sees to it")
