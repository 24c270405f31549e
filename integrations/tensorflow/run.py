"""The exchange of one list of variables: a mode, and its steps as TensorFlow operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_oktopk.modes.make import kind_of, make_mode
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.selection.accumulator import ResidualAccumulator
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.tensorflow.graph import call, repeat, weakly
from horovod_oktopk.tensorflow.tensors import (
    DenseArrays,
    Form,
    LendingAccumulator,
    OwnArrays,
    Signature,
    TensorLayout,
    all_finite,
    is_dense,
    new_memory,
    ranks_of,
    signature_of,
)
from horovod_oktopk.tensorflow.variables import VariableReplica, name_of, tensor_of

Array = NDArray[Any]
Local = Callable[[list[Any]], object]
"""Applies gradients, one for each variable, by the plain optimizer."""


class Run:
    """The mode of one list of variables, on this rank.

    gradients: of the first step. normalizes: True if the optimizer normalizes its gradients.
    Only a mode that acts at an optimizer's step holds the variables, as the optimizer does; that of a tape must not.
    """

    def __init__(self, options: Any, op: Any, process_set: Any, variables: Sequence[Any], gradients: Sequence[Any],
                 normalizes: bool) -> None:
        kind = kind_of(options)
        self.signature = signature_of(variables, gradients)
        self._tensors = [tensor_of(v) for v in variables] if kind.acts_at_step else []
        parts = ([(v, tensor_of(v).dtype) for v in variables] if kind.reads_memory else
                 [(v, g.dtype) for v, g in zip(variables, gradients, strict=True) if is_dense(g)])
        layout = TensorLayout((name_of(v), tuple(v.shape), dtype.name) for v, dtype in parts)
        self._layout = layout
        self._memory_for: Callable[[int], Array] = partial(new_memory, layout)
        overlaps = kind.acts_at_step and getattr(options, "overlap", True)
        self.mode: Mode = make_mode(
            options, op == hvd.Average, layout, ranks_of(process_set, kind.acts_at_step, overlaps), self._lending,
            lambda: (NumpyParameterAccumulator(layout.n, layout.dtype), VariableReplica(layout, self._tensors)),
            normalizes=normalizes, settings=["learning_rate"], signature=self.signature)
        self.mode.belongs_to(self)
        self.take_state: Callable[[Mode], None] | None = None
        """Loads a state. It is called once, on all ranks, when the next step is taken."""
        self._density = getattr(options, "density", None)
        self._process_set = process_set
        self._dense = [is_dense(g) for g in gradients]
        if kind.reads_memory:
            with tf.init_scope():
                self.factor = tf.Variable(1.0, trainable=False, name="step_ahead_coefficient")
                """λ · gain of the step at hand."""
                self.gain = tf.Variable(1.0, trainable=False, name="step_ahead_gain")
            self._touched = [*self._tensors, self.factor, self.gain, _turn()]

    def _lending(self, layout: TensorLayout) -> ResidualAccumulator:
        accumulator = LendingAccumulator(layout)
        self._memory_for = accumulator.memory_for
        return accumulator

    # Gradients.

    def reduce(self, gradients: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices],
               density: float | None) -> list[tf.Tensor]:
        """Return the reduced dense gradients: all NaN if one is not finite on some rank, or one of the slices.

        density: from here on, if the caller asks for another than at the step before.
        """
        return call(partial(weakly(self._reduce), density), [all_finite(slices), *gradients],
                    [g.dtype for g in gradients], [g.shape for g in gradients])

    def refuse(self, gradients: Sequence[tf.Tensor], signature: Signature, message: str) -> list[tf.Tensor]:
        """Raise PluginError for a step that cannot be taken; the ranks that do take it raise AgreementError."""
        return call(partial(weakly(self._refuse), signature, message), [], [g.dtype for g in gradients],
                    [g.shape for g in gradients])

    def _refuse(self, signature: Signature, message: str, *_: Array) -> list[Array]:
        self.mode.refuse_step(message, signature)

    def _reduce(self, density: float | None, finite: Array, *arrays: Array) -> list[Array]:
        if density is not None and density != self._density:  # else `set_density` holds
            self.mode.set_density(density)
            self._density = density
        self._load()
        gradients = DenseArrays(self._layout, arrays, self._memory_for)
        self.mode.reduce(gradients, bool(finite))
        return gradients.written

    # An optimizer's own steps.

    def step(self, variables: Sequence[Any], gradients: Sequence[Any], local: Local,
             checks_overflow: bool = False) -> None:
        """Take the local steps that follow from this rank's gradients: none, or one.

        checks_overflow: True if `local` looks for overflow by itself, and is to be called in any case.
        """
        form = Form(variables, gradients, self._tensors)
        [count] = call(partial(weakly(self._begin), form), [all_finite(gradients), *form.inputs(gradients)],
                       [tf.int32], [()], self._touched)
        if checks_overflow:
            local(list(gradients))
        else:
            repeat(count, lambda _: local(list(gradients)), at_most_once=True)
        call(weakly(self._end), [], touched=self._touched)

    def _begin(self, form: Form, finite: Array, *inputs: Array) -> list[Array]:
        self.resume()
        count = self.mode.begin(OwnArrays(self._layout, form, inputs, bool(finite)))
        self.factor.assign(self.mode.coefficient * self.mode.gain)
        self.gain.assign(self.mode.gain)
        return [np.array(count, np.int32)]

    def _end(self) -> list[Array]:
        self.mode.end()
        return []

    @property
    def own_variables(self) -> list[Any]:
        """The variables that hold this rank's own parameters now."""
        return self._tensors if self.mode.holds_own else []

    def resume(self) -> None:
        """Take a state that waits, on all ranks together; then the variables are this rank's own again."""
        self._load()
        self.mode.resume()

    def _load(self) -> None:
        if self.take_state is not None:
            take, self.take_state = self.take_state, None
            take(self.mode)

    # Rounds.

    def serve(self, gradients: Sequence[Any], rate: tf.Variable | None, local: Local) -> None:
        """Hand in the gradients; take a local step for each round since the last call.

        rate: the learning rate, which a round sets.
        """
        mine = tf.constant(0.0, tf.float64) if rate is None else tf.cast(rate, tf.float64)
        [count] = call(weakly(self._hand_in), [mine, *(g for g in gradients if is_dense(g))], [tf.int32], [()])
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
        for index, tensor in enumerate(self._tensors if self.mode.drifts else ()):
            tensor.assign(hvd.allreduce(tensor, op=hvd.Average, name=f"horovod_oktopk.model.{index}",
                                        process_set=self._process_set))

    def _hand_in(self, rate: Array, *arrays: Array) -> list[Array]:
        self._load()
        count = self.mode.begin(DenseArrays(self._layout, arrays, self._memory_for), [float(rate)])
        return [np.array(count, np.int32)]

    def _apply_round(self, number: tf.Tensor, rate: tf.Variable | None, local: Local) -> None:
        entries = self._layout.entries
        of_round, *dense = call(weakly(self._next), [number], [tf.float64, *(dtype for *_, dtype in entries)],
                                [(), *(shape for _, shape, _ in entries)])
        if rate is not None:
            rate.assign(tf.cast(of_round, rate.dtype))
        remaining = iter(dense)
        local([next(remaining) if each else None for each in self._dense])

    def _next(self, _: Array) -> list[Array]:
        gradients = DenseArrays(self._layout, (), partial(new_memory, self._layout))
        [rate] = self.mode.prepare(gradients)
        return [np.array(rate), *gradients.written]


@functools.cache
def _turn() -> tf.Variable:
    """Return a variable that every step touches: so TensorFlow takes all steps of a graph in the program's order.

    Otherwise ranks could take those of two optimizers in different orders, and wait for each other.
    """
    with tf.init_scope():
        turn: tf.Variable = tf.Variable(0.0, trainable=False, name="step_ahead_turn")
    return turn
