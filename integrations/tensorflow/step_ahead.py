"""`compression=StepAhead(...)`: Keras optimizers take their own steps, and what those did to variables is reduced.

Gradients stay the rank's own; where each host is one worker, they are averaged over its ranks. A step is two calls of
Python around the optimizer's own, in a graph or eagerly. In a graph they have the variables for inputs: so TensorFlow
runs them after whatever reads or writes these before, and ahead of whatever does afterwards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_oktopk.errors import PluginError
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.step_ahead.options import StepAhead
from horovod_oktopk.step_ahead.reducer import StepAheadReducer as Core
from horovod_oktopk.tensorflow.layout import TensorLayout
from horovod_oktopk.tensorflow.local_step import GivenGradients, Pairs
from horovod_oktopk.tensorflow.reducer import check_place, guarded, name_of, weakly
from horovod_oktopk.tensorflow.registry import GradientReducer, gradient_reducer_of, tensor_of
from horovod_oktopk.tensorflow.replica import VariableReplica
from horovod_oktopk.tensorflow.transport import ranks_of

Array = NDArray[Any]

_ALL: weakref.WeakSet[OwnSteps] = weakref.WeakSet()


class OwnSteps(GradientReducer):
    """Takes the steps of one optimizer; on every rank of its process set."""

    def __init__(self, options: StepAhead, op: Any, process_set: Any) -> None:
        super().__init__(options.scheme, op, process_set, sparse_as_dense=False, sparse=None)
        self.step_ahead = options
        self.normalizes = False
        """Whether the optimizer normalizes its gradients."""
        self._present: StepAheadReducer | None = None
        self._average: Callable[..., Any] | None = None
        _ALL.add(self)

    @property
    def is_stepping(self) -> bool:
        """Whether the optimizer takes a step of its own, or that is being traced."""
        return self._present is not None

    def by_variables(self) -> dict[tuple[int, ...], StepAheadReducer]:
        """Its reducers, by the identities of their variables."""
        return cast(dict[tuple[int, ...], StepAheadReducer], self.present_reducers())

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks of a host."""
        return bool(self.options.hierarchical) and self.takes_part

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any] = (), *_: Any, **__: Any) -> list[Any]:
        """What reduces gradients elsewhere: here they stay what they are, but for the average of a host's ranks."""
        if not self.averages or self.is_stepping:  # inside a step they have been averaged
            return list(grads)
        if self._average is None:
            host = ranks_of(self.process_set).host_set(self.options.transport, self.options.hierarchical)
            self._average = (lambda grads, _: grads) if host is None else hvd._make_allreduce_grads_fn(
                "HostAverage", "", "", hvd.Compression.none, False, self.op, 1.0, None, host)
        averaged: list[Any] = list(self._average(list(grads), [tensor_of(variable) for variable in variables]))
        return averaged

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def step(self, variables: Sequence[Any], pairs: Pairs, update: Callable[[], object]) -> None:
        """The optimizer's own step, between an exchange's end and the next one's beginning.

        variables: all that the optimizer has been built with. pairs: gradients with their variables: where one is not
        finite, `update` is left out, and this rank takes part in the exchange with what it has; none where `update`
        looks by itself, and calls `observe`.
        """
        if not self.takes_part:
            update()
            return
        check_place()
        reducer = self.reducer_over(variables)
        finite = _all_finite([gradient for gradient, _ in pairs])
        given = reducer.given(pairs)
        _in_order(functools.partial(weakly(reducer.begin), given), reducer.touched, finite, *given.inputs(pairs))
        self._present = reducer
        try:
            _if(finite, update) if len(pairs) else update()
        finally:
            self._present = None
        _in_order(weakly(reducer.end), reducer.touched)

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def observe(self, pairs: Pairs) -> None:
        """Inside a step: the gradients that the optimizer applies, where `step` had none."""
        if self._present is not None:
            given = self._present.given(pairs)
            _in_order(functools.partial(weakly(self._present.observe), given), self._present.touched,
                      *given.inputs(pairs))

    def times_coefficient(self, learning_rate: Any) -> Any:
        """λ · gain times an optimizer's learning rate while it takes its step; otherwise what the user has given."""
        if self._present is None:
            return learning_rate
        rate = tf.convert_to_tensor(learning_rate)
        return rate * tf.cast(self._present.coefficient, rate.dtype)

    def over_gain(self, weight_decay: Any) -> Any:
        """A weight decay that goes by the learning rate, divided by the gain while a step is taken."""
        if self._present is None or not weight_decay:
            return weight_decay
        return tf.convert_to_tensor(weight_decay, tf.float32) / self._present.gain

    def reducer_over(self, variables: Sequence[Any]) -> StepAheadReducer:
        """That of these variables: a new one at first, and the one of more variables for some of them."""
        key = tuple(id(tensor_of(variable)) for variable in variables)
        for known, reducer in self.by_variables().items():
            if set(key) <= set(known):
                return reducer
            if set(key) & set(known):
                raise PluginError("StepAhead has no place for variables that join others after the first step: make "
                                  "a new optimizer, as for compile(), or build it with all variables at first")
        reducer = StepAheadReducer(self.step_ahead, self.op, self.process_set, variables, self.normalizes)
        for before in step_aheads_over(variables):  # of an optimizer that has had these: the model holds w then
            before.flat.suspend()
        if self.options is not self.step_ahead.scheme:
            reducer.flat.set_density(self.options.density)
        return self._add(key, reducer, list(variables))


class DecoupledDecay:
    """A weight decay that goes by the learning rate, as an attribute of an optimizer.

    It is what the user has set; while a step is taken, divided by the gain.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        try:
            decay = vars(optimizer)[self._name]
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__} has no {self._name}") from None
        steps = getattr(optimizer, "_allreduce_grads", None)
        return steps.over_gain(decay) if isinstance(steps, OwnSteps) else decay

    def __set__(self, optimizer: Any, decay: Any) -> None:
        vars(optimizer)[self._name] = decay


class StepAheadReducer:
    """Keeps what all ranks share of one list of variables; on every rank of the process set."""

    def __init__(self, options: StepAhead, op: Any, process_set: Any, variables: Sequence[Any],
                 normalizes: bool) -> None:
        tensors = [tensor_of(v) for v in variables]
        layout = TensorLayout((name_of(v), tuple(v.shape), tensor.dtype.name)
                              for v, tensor in zip(variables, tensors, strict=True))
        self.flat: Core[TensorLayout] = Core(
            options, op == hvd.Average, layout, NumpyParameterAccumulator(layout.n, layout.dtype),
            VariableReplica(layout, tensors), ranks_of(process_set, own_channel=True, yield_cpu=options.overlap),
            normalizes)
        self._tensors = tensors
        self.before_step: Callable[[Core[TensorLayout]], None] | None = None
        """Called once, on all ranks, when the next step is taken."""
        with tf.init_scope():
            self.coefficient = tf.Variable(1.0, trainable=False, name="step_ahead_coefficient")
            """λ · gain of the step at hand."""
            self.gain = tf.Variable(1.0, trainable=False, name="step_ahead_gain")
        self.touched: list[tf.Variable] = [*tensors, self.coefficient, self.gain, _turn()]
        """The variables that a step reads and writes."""

    def resume(self) -> None:
        """Before the gradients of a step are computed: a state that waits is taken, on all ranks together; and the
        variables are this rank's own again."""
        if self.before_step is not None:
            action, self.before_step = self.before_step, None
            action(self.flat)
        self.flat.resume()

    def given(self, pairs: Pairs) -> GivenGradients:
        """The gradients that a step is given, in the layout."""
        return GivenGradients(pairs, self._tensors)

    def begin(self, given: GivenGradients, finite: Array, *inputs: Array) -> None:
        """Before the optimizer's own step. finite: whether it is taken. inputs: gradients, as `given` has them."""
        self.resume()
        self.flat.begin_step()
        self.coefficient.assign(self.flat.coefficient * self.flat.gain)
        self.gain.assign(self.flat.gain)
        if not finite:
            self.flat.skip_local_step()
        elif inputs:
            self.observe(given, *inputs)

    def observe(self, given: GivenGradients, *inputs: Array) -> None:
        """Looks at what the optimizer is given."""
        self.flat.observe(given.gather(inputs, self.flat.layout.offsets))

    def end(self) -> None:
        """After it."""
        self.flat.end_step()


def own_steps_of(optimizer: Any) -> OwnSteps | None:
    """Of an optimizer, or of the one inside it that loss scaling has wrapped; None with any other compression."""
    found = gradient_reducer_of(optimizer)
    return found if isinstance(found, OwnSteps) else None


def step_aheads_over(variables: Sequence[Any]) -> list[StepAheadReducer]:
    """All that train one of these variables, whatever optimizer has them."""
    wanted = {id(tensor_of(variable)) for variable in variables}
    return [reducer for steps in list(_ALL) for key, reducer in steps.by_variables().items()
            if not wanted.isdisjoint(key)]


def is_made() -> bool:
    """Whether an optimizer with StepAhead lives in this process; it may be about to take its first step."""
    return len(_ALL) > 0


def is_in_use() -> bool:
    """Whether anything trains with StepAhead in this process."""
    return any(steps.reducers for steps in list(_ALL))


@functools.cache
def _turn() -> tf.Variable:
    """A variable that every step touches: so TensorFlow takes all steps of a graph in the order of the program.

    Otherwise ranks could take those of two optimizers in different orders, and wait for each other.
    """
    with tf.init_scope():
        turn: tf.Variable = tf.Variable(0.0, trainable=False, name="step_ahead_turn")
    return turn


def _all_finite(grads: Sequence[Any]) -> tf.Tensor:
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values] or [True])


def _if(condition: tf.Tensor, action: Callable[[], object]) -> None:
    if not tf.executing_eagerly():
        tf.cond(condition, lambda: _nothing(action()), _nothing)
    elif condition:
        action()


def _nothing(*_: Any) -> tf.Tensor:
    return tf.constant(0)


def _in_order(action: Callable[..., None], touched: Sequence[tf.Variable], *inputs: tf.Tensor) -> None:
    """Calls it with the tensors' values: now, or when the graph runs, in order with what else touches the variables.
    """
    if tf.executing_eagerly():
        action(*map(np.asarray, inputs))
        return

    def run(*given: tf.Tensor) -> None:
        guarded(action, *(np.asarray(each) for each in given[:len(inputs)]))

    tf.py_function(run, [*inputs, *(v.handle for v in touched)], [], name="HorovodAllreduce_step_ahead")

