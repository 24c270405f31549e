"""Python functions as operations of TensorFlow, which run now or whenever a graph runs; and where they cannot.

They run in the order of the program. Each rank then communicates in one place and in one order, whatever TensorFlow
runs side by side.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_oktopk.errors import PluginError, TransportError
from horovod_oktopk.tensorflow.private import is_compiled_by_xla
from horovod_oktopk.tensorflow.variables import Array

logger = logging.getLogger("horovod_oktopk")

NAME = "HorovodAllreduce_oktopk"
"""The operations' name, by which elastic training knows a failed collective."""
GONE = ("a graph reduces gradients for an optimizer, or for variables of a tape, that are gone: keep the optimizer "
        "and the model for as long as the function that was traced with them is called")


def call(method: Callable[..., Sequence[Array] | None], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType] = (),
         shapes: Sequence[Any] = (), touched: Sequence[tf.Variable] = (),
         given: Sequence[Any] = ()) -> list[tf.Tensor]:
    """Call an object's method with the tensors' values, as arrays, now or when the graph runs; return its results.

    The method reads or writes `touched`; a graph runs it in order with whatever else touches these variables. It gets
    `given` before the arrays. TensorFlow never drops a graph, which must not keep the object alive then.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(result) for result in method(*given, *map(np.asarray, inputs)) or ()]
    guarded = partial(_guarded, weakref.WeakMethod(method), given, len(inputs))
    if touched:
        results = tf.py_function(guarded, [*inputs, *(v.handle for v in touched)], list(dtypes), name=NAME)
    else:
        results = tf.numpy_function(guarded, list(inputs), list(dtypes), name=NAME)
    if not dtypes:  # TensorFlow gives the operation itself
        return []
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _guarded(kept: weakref.WeakMethod[Callable[..., Sequence[Array] | None]], given: Sequence[Any], count: int,
             *inputs: Any) -> Sequence[Array]:
    """Call a method in a graph, with the first inputs. Raise errors as TensorFlow passes them on; log each in a line.

    Elastic training takes up again after an UnknownError that names HorovodAllreduce, and takes any
    other for success: so failed communication becomes the one, and all else an InvalidArgumentError.
    """
    try:
        method = kept()
        if method is None:
            raise PluginError(GONE)
        return method(*given, *map(np.asarray, inputs[:count])) or ()
    except Exception as error:
        _log_once(f"{type(error).__name__}: {' '.join(str(error).split())}")
        if isinstance(error, HorovodInternalError | TransportError):
            raise RuntimeError(f"HorovodAllreduce failed: {error}") from error
        raise ValueError(f"{type(error).__name__}: {error}") from error


def when(condition: tf.Tensor, action: Callable[[], object], otherwise: Callable[[], object] = lambda: None) -> None:
    """Take an action if the condition holds when this runs, and otherwise another."""
    if tf.executing_eagerly():
        (action if condition else otherwise)()
    else:
        tf.cond(condition, lambda: (action(), tf.constant(0))[1], lambda: (otherwise(), tf.constant(0))[1])


def repeat(count: tf.Tensor, action: Callable[[tf.Tensor], object]) -> None:
    """Take an action `count` times, one after another, with the number of those before."""
    if tf.executing_eagerly():
        for number in range(int(count)):
            action(tf.constant(number))
    else:
        tf.while_loop(lambda i: i < count, lambda i: (action(i), i + 1)[1], [tf.constant(0)],
                      parallel_iterations=1)


@lru_cache(maxsize=16)
def _log_once(text: str) -> None:
    """Log an error, which TensorFlow hides among the names of its graph and stacks."""
    logger.error("%s", text)


def refuse_replicas() -> None:
    """Raise PluginError inside a strategy of tf.distribute that makes or reduces replicas by itself."""
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        kinds = vars(tf.distribute).items()
        name = next((name for name, kind in kinds if kind is type(strategy)), type(strategy).__name__)
        raise PluginError(f"tf.distribute.{name} makes replicas, and reduces their gradients, by "
                          "itself, and Horovod reduces between processes: start one process for each device "
                          "(horovodrun -np), and leave the strategy out")


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
