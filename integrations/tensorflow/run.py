"""The exchange of one list of variables: a mode, and its steps as TensorFlow operations.

Python functions as operations run now, or whenever a graph runs, in the order of the program. Each rank then
communicates in one place and in one order, whatever TensorFlow runs side by side.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_oktopk.errors import PluginError, TransportError
from horovod_oktopk.modes.make import kind_of, make_mode
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.selection.accumulator import ResidualAccumulator
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.tensorflow.private import is_compiled_by_xla
from horovod_oktopk.tensorflow.tensors import (
    DenseArrays,
    Form,
    LendingAccumulator,
    OwnArrays,
    Signature,
    all_finite,
    form_of,
    inputs_of,
    is_dense,
    ranks_of,
    signature_of,
)
from horovod_oktopk.tensorflow.variables import Array, VariableReplica, name_of, tensor_of
from horovod_oktopk.vectors.layout import Layout

logger = logging.getLogger("horovod_oktopk")

Local = Callable[[list[Any]], object]
"""Applies gradients, one for each variable, by the plain optimizer."""
Refusal = tuple[str, Signature]
"""The reason why gradients are refused, and their signature."""
NO_RATE = partial(tf.constant, 0.0, tf.float64)
"""Makes the learning rate that is told where there is none."""
NAME = "HorovodAllreduce_oktopk"
"""The operations' name, by which elastic training knows a failed collective."""
GONE = ("a graph reduces gradients for an optimizer, or for variables of a tape, that are gone: keep the optimizer "
        "and the model for as long as the function that was traced with them is called")


class Run:
    """The mode of one list of variables, on this rank.

    The gradients are those of the first step. `normalizes` is True if the optimizer normalizes its gradients. `rate`
    returns its learning rate.
    Only a mode that acts at an optimizer's step holds the variables, as the optimizer does; that of a tape must not.
    """

    def __init__(self, options: Any, op: Any, process_set: Any, variables: Sequence[Any], gradients: Sequence[Any],
                 normalizes: bool, rate: Callable[[], tf.Tensor] = NO_RATE) -> None:
        kind = kind_of(options)
        self.signature = signature_of(variables, gradients)
        self.tensors = [tensor_of(v) for v in variables] if kind.acts_at_step else []
        parts = ([(v, tensor_of(v).dtype) for v in variables] if kind.reads_memory else
                 [(v, g.dtype) for v, g in zip(variables, gradients, strict=True) if is_dense(g)])
        layout = Layout((name_of(v), tuple(v.shape), dtype.name) for v, dtype in parts)
        self._layout = layout
        self._lender: LendingAccumulator | None = None
        overlaps = kind.acts_at_step and getattr(options, "overlap", True)
        self.mode: Mode[Any] = make_mode(
            options, op == hvd.Average, layout, ranks_of(process_set, kind.acts_at_step, overlaps), self._lending,
            lambda: (NumpyParameterAccumulator(layout.n, layout.dtype), VariableReplica(layout, self.tensors)),
            normalizes=normalizes, settings=["learning_rate"], signature=self.signature)
        self.mode.belongs_to(self)
        self.load_state_now: Callable[[Mode[Any]], None] | None = None
        """Loads a state. It is called once, on all ranks, when the next step is taken."""
        self._density = getattr(options, "density", None)
        self._process_set, self._rate = process_set, rate
        self._dense = [is_dense(g) for g in gradients]
        if kind.reads_memory:
            with tf.init_scope():
                self.factor = tf.Variable(1.0, trainable=False, name="step_ahead_coefficient")
                """λ · gain of the step at hand."""
                self.gain = tf.Variable(1.0, trainable=False, name="step_ahead_gain")
            self._touched = [*self.tensors, self.factor, self.gain, _turn()]

    def _lending(self) -> ResidualAccumulator:
        self._lender = LendingAccumulator(self._layout)
        return self._lender

    # Gradients.

    def reduce(self, gradients: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices],
               density: float | None, refusal: Refusal | None) -> list[tf.Tensor]:
        """Return the reduced dense gradients: all NaN if one is not finite on some rank, or one of the slices.

        The density holds from here on, if the caller asks for another than at the step before. A refusal is why the
        step cannot be taken; then PluginError is raised, and the ranks that do take it raise AgreementError.
        """
        return call(self._reduce, [self._rate(), all_finite(slices), *gradients], [g.dtype for g in gradients],
                    [g.shape for g in gradients], given=(density, refusal))

    def _reduce(self, density: float | None, refusal: Refusal | None, rate: Array, finite: Array,
                *arrays: Array) -> list[Array]:
        if refusal:
            self.mode.refuse_step(*refusal)
        if density is not None and density != self._density:  # else `set_density` holds
            self.mode.set_density(density)
            self._density = density
        self._load()
        self.mode.tell_rates([float(rate)])
        gradients = DenseArrays(self._layout, arrays, self._lender)
        self.mode.reduce(gradients, bool(finite))
        return gradients.written

    # An optimizer's own steps.

    def step(self, variables: Sequence[Any], gradients: Sequence[Any], local: Local,
             checks_overflow: bool = False) -> None:
        """Take the local steps that follow from this rank's gradients: none, or one.

        If `checks_overflow`, `local` looks for overflow by itself, and is to be called in any case.
        """
        form = form_of(variables, gradients, self.tensors)
        [count] = call(self._begin, [self._rate(), all_finite(gradients), *inputs_of(gradients)], [tf.int32], [()],
                       self._touched, given=(form,))
        if checks_overflow:
            local(list(gradients))
        else:
            repeat(count, lambda _: local(list(gradients)), at_most_once=True)
        call(self._end, [], touched=self._touched)

    def _begin(self, form: Form, rate: Array, finite: Array, *inputs: Array) -> list[Array]:
        self.resume()
        self.mode.tell_rates([float(rate)])
        count = self.mode.begin(OwnArrays(self._layout, form, inputs, bool(finite)))
        self.factor.assign(self.mode.coefficient * self.mode.gain)
        self.gain.assign(self.mode.gain)
        return [np.array(count, np.int32)]

    def _end(self) -> list[Array]:
        self.mode.end()
        return []

    def resume(self) -> None:
        """Take a state that waits, on all ranks together; then the variables are this rank's own again."""
        self._load()
        self.mode.resume()

    def _load(self) -> None:
        if self.load_state_now is not None:
            take, self.load_state_now = self.load_state_now, None
            take(self.mode)

    # Rounds.

    def step_in_rounds(self, gradients: Sequence[Any], rate: tf.Variable | None, local: Local) -> None:
        """Hand in the gradients; take a local step for each round since the last call.

        A round sets the learning rate.
        """
        mine = tf.constant(0.0, tf.float64) if rate is None else tf.cast(rate, tf.float64)
        [count] = call(self._hand_in, [mine, *(g for g in gradients if is_dense(g))], [tf.int32], [()])
        repeat(count, lambda number: self._apply_round(number, rate, local), at_most_once=False)
        if rate is not None:
            rate.assign(tf.cast(mine, rate.dtype))

    def synchronize(self, rate: tf.Variable | None, local: Local) -> None:
        """Serve rounds until all ranks are here, and apply them as they end. Collective."""
        mine = None if rate is None else tf.identity(rate)
        for count in self.mode.synchronize():
            for number in range(count):
                self._apply_round(tf.constant(number), rate, local)
        if rate is not None:
            rate.assign(mine)
        for index, tensor in enumerate(self.tensors if self.mode.drifts else ()):
            tensor.assign(hvd.allreduce(tensor, op=hvd.Average, name=f"horovod_oktopk.model.{index}",
                                        process_set=self._process_set))

    def _hand_in(self, rate: Array, *arrays: Array) -> list[Array]:
        self._load()
        count = self.mode.begin(DenseArrays(self._layout, arrays), [float(rate)])
        return [np.array(count, np.int32)]

    def _apply_round(self, number: tf.Tensor, rate: tf.Variable | None, local: Local) -> None:
        entries = self._layout.entries
        of_round, *dense = call(self._next, [number], [tf.float64, *(dtype for *_, dtype in entries)],
                                [(), *(shape for _, shape, _ in entries)])
        if rate is not None:
            rate.assign(tf.cast(of_round, rate.dtype))
        remaining = iter(dense)
        local([next(remaining) if each else None for each in self._dense])

    def _next(self, _: Array) -> list[Array]:
        gradients = DenseArrays(self._layout, ())
        [rate] = self.mode.prepare(gradients)
        return [np.array(rate), *gradients.written]


@cache
def _turn() -> tf.Variable:
    """Return a variable that every step touches: so TensorFlow takes all steps of a graph in the program's order.

    Otherwise ranks could take those of two optimizers in different orders, and wait for each other.
    """
    with tf.init_scope():
        turn: tf.Variable = tf.Variable(0.0, trainable=False, name="step_ahead_turn")
    return turn


# Python functions as operations.

def call(method: Callable[..., Sequence[Array]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType] = (),
         shapes: Sequence[Any] = (), touched: Sequence[tf.Variable] = (),
         given: Sequence[Any] = ()) -> list[tf.Tensor]:
    """Call an object's method with the tensors' values, as arrays, now or when the graph runs; return its results.

    The method reads or writes `touched`; a graph runs it in order with whatever else touches these variables. It gets
    `given` before the arrays. TensorFlow never drops a graph, which must not keep the object alive then.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(result) for result in method(*given, *map(np.asarray, inputs))]
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


def _guarded(kept: weakref.WeakMethod[Callable[..., Sequence[Array]]], given: Sequence[Any], count: int,
             *inputs: Any) -> Sequence[Array]:
    """Call a method in a graph, with the first inputs. Raise errors as TensorFlow passes them on; log each in a line.

    Elastic training takes up again after an UnknownError that names HorovodAllreduce, and takes any
    other for success: so failed communication becomes the one, and all else an InvalidArgumentError.
    """
    try:
        method = kept()
        if method is None:
            raise PluginError(GONE)
        return method(*given, *map(np.asarray, inputs[:count]))
    except Exception as error:
        _log_once(f"{type(error).__name__}: {' '.join(str(error).split())}")
        if isinstance(error, HorovodInternalError | TransportError):
            raise RuntimeError(f"HorovodAllreduce failed: {error}") from error
        raise ValueError(f"{type(error).__name__}: {error}") from error


def repeat(count: tf.Tensor, action: Callable[[tf.Tensor], object], at_most_once: bool) -> None:
    """Take an action `count` times, one after another, with the number of those before."""
    if tf.executing_eagerly():
        for number in range(int(count)):
            action(tf.constant(number))
    elif at_most_once:
        tf.cond(count > 0, lambda: and_then(action(tf.constant(0)), tf.constant(0)), lambda: tf.constant(0))
    else:
        tf.while_loop(lambda i: i < count, lambda i: and_then(action(i), i + 1), [tf.constant(0)],
                      parallel_iterations=1)


def and_then(_: object, result: tf.Tensor) -> tf.Tensor:
    """Return the result, after an action in a branch or loop of a graph."""
    return result


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
