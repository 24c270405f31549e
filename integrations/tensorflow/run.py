"""The exchange of one list of variables: a mode, and its steps as TensorFlow operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.make import kind_of, make_mode
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.modes.step_ahead.messages import INSIDE
from horovod_oktopk.selection.accumulator import ResidualAccumulator
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.tensorflow.operations import call, repeat, when
from horovod_oktopk.tensorflow.tensors import (
    DenseArrays,
    Form,
    LendingAccumulator,
    OwnArrays,
    Signature,
    all_finite,
    allreduce,
    form_of,
    inputs_of,
    is_dense,
    ranks_of,
    signature_of,
)
from horovod_oktopk.tensorflow.variables import Array, VariableReplica, key_of, name_of, tensor_of
from horovod_oktopk.vectors.layout import Layout

ALL: weakref.WeakSet[Any] = weakref.WeakSet()
"""The Runs of all optimizers, and of all tapes; a rank may still have some that another's garbage collector took."""
Local = Callable[[list[Any]], object]
"""Applies gradients, one for each variable, by the plain optimizer."""
Refusal = tuple[str, Signature]
"""The reason why gradients are refused, and their signature."""
RateOf = Callable[[], tf.Variable | None]
"""Returns an optimizer's learning rate, if that is a variable."""


class Run:
    """The mode of one list of variables, on this rank; a derived class is for one mode.

    The gradients are those of the first step. `normalizes` is True if the optimizer normalizes its gradients.
    """

    holds_variables: ClassVar[bool] = True
    """False where a tape has the run, which must go with the variables."""

    def __init__(self, options: Any, op: Any, process_set: Any, variables: Sequence[Any], gradients: Sequence[Any],
                 normalizes: bool, rate: RateOf) -> None:
        self.signature = signature_of(variables, gradients)
        self.tensors = [tensor_of(v) for v in variables] if self.holds_variables else []
        layout = Layout((name_of(v), tuple(v.shape), dtype.name) for v, dtype in self._parts(variables, gradients))
        self._layout = layout
        self._lender: LendingAccumulator | None = None
        self.mode: Mode[Any] = make_mode(
            options, op == hvd.Average, layout, ranks_of(process_set, *kind_of(options).channel(options)),
            self._lending,
            lambda: (NumpyParameterAccumulator(layout.n, layout.dtype), VariableReplica(layout, self.tensors)),
            normalizes=normalizes, settings=["learning_rate"], signature=self.signature)
        self.mode.belongs_to(self)
        self.load_state_now: Callable[[Mode[Any]], None] | None = None
        """Loads a state. It is called once, on all ranks, when the next step is taken."""
        self.gave_way = False
        """True if another optimizer has trained the variables since that state was asked for."""
        self.is_open: Callable[[], bool] = lambda: False
        """Tells whether the program is inside `shared_parameters` of this optimizer."""
        self._density = getattr(options, "present_density", None)
        self._process_set, self._rate = process_set, rate
        self._dense = [is_dense(g) for g in gradients]

    def _parts(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[tuple[Any, tf.DType]]:
        """Return the variables of the layout, and the dtypes: by default those of the dense gradients."""
        return [(v, g.dtype) for v, g in zip(variables, gradients, strict=True) if is_dense(g)]

    def _lending(self) -> ResidualAccumulator:
        self._lender = LendingAccumulator(self._layout)
        return self._lender

    def told_rate(self) -> tf.Tensor:
        """Return the learning rate that this rank tells the others: 0 where it is no variable."""
        rate = self._rate()
        return tf.constant(0.0, tf.float64) if rate is None else tf.cast(rate, tf.float64)

    def resume(self) -> None:
        """Have the variables be this rank's own again, if this run has had them at last."""
        self.mode.resume()

    def load(self) -> None:
        """Load a state that waits, on all ranks together."""
        if self.load_state_now is not None:
            take, self.load_state_now = self.load_state_now, None
            take(self.mode)
            if self.gave_way:
                self.mode.suspend(for_another=True)


class GradientRun(Run):
    """The reduction of gradients, of a tape or before an optimizer's step."""

    holds_variables = False

    def reduce(self, gradients: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices],
               density: float | None, refusal: Refusal | None) -> list[tf.Tensor]:
        """Return the reduced dense gradients: all NaN if one is not finite on some rank, or one of the slices.

        The density holds from here on, if the caller asks for another than at the step before. A refusal is why the
        step cannot be taken; then PluginError is raised, and the ranks that do take it raise AgreementError.
        """
        return call(self._reduce, [self.told_rate(), all_finite(slices), *gradients], [g.dtype for g in gradients],
                    [g.shape for g in gradients], given=(density, refusal))

    def _reduce(self, density: float | None, refusal: Refusal | None, rate: Array, finite: Array,
                *arrays: Array) -> list[Array]:
        if refusal:
            self.mode.refuse_step(*refusal)
        if density is not None and density != self._density:  # else `set_density` holds
            self.mode.set_density(density)
            self._density = density
        self.load()
        self.mode.reduction.tell_rates([float(rate)])
        gradients = DenseArrays(self._layout, arrays, self._lender)
        self.mode.reduce(gradients, bool(finite))
        return gradients.written


class StepAheadRun(Run):
    """The optimizer's own steps over this rank's gradients, and the exchange of what they did to the variables."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with tf.init_scope():
            self.factor = tf.Variable(1.0, trainable=False, name="step_ahead_factor")
            """λ · gain of the step at hand."""
            self.gain = tf.Variable(1.0, trainable=False, name="step_ahead_gain")
        self._touched = [*self.tensors, self.factor, self.gain, _turn()]

    def _parts(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[tuple[Any, tf.DType]]:  # noqa: ARG002
        """Return all variables: their moves are exchanged, whatever their gradients are like."""
        return [(v, tensor_of(v).dtype) for v in variables]

    def step(self, variables: Sequence[Any], gradients: Sequence[Any], local: Local,
             checks_overflow: bool) -> None:
        """Take the local steps that follow from this rank's gradients: none, or one.

        If `checks_overflow`, `local` looks for overflow by itself, and is to be called in any case.
        """
        form = form_of(variables, gradients, self.tensors)
        [count] = call(self._begin, [self.told_rate(), all_finite(gradients), *inputs_of(gradients)], [tf.int32],
                       [()], self._touched, given=(form, checks_overflow))
        if checks_overflow:
            local(list(gradients))
        else:
            when(count > 0, lambda: local(list(gradients)))
        call(self.mode.end, [], touched=self._touched)

    def catch_up(self) -> None:
        """Apply the exchange under way, if there is one."""
        call(self.mode.catch_up, [], touched=self._touched)

    def _others(self) -> list[StepAheadRun]:
        """Return the runs of other optimizers over some of these variables, which take turns with this one."""
        return [each for each in runs_over(key_of(self.tensors)) if each is not self]

    def resume(self) -> None:
        self.mode.resume(self._make_way)

    def _make_way(self) -> None:
        for other in self._others():
            other.give_way()

    def give_way(self) -> None:
        """Have the variables hold what all ranks share, as another optimizer is about to train them."""
        self.mode.suspend(for_another=True)
        self.gave_way = True

    def _begin(self, form: Form, scaled: bool, rate: Array, finite: Array, *inputs: Array) -> list[Array]:
        if self.is_open():
            raise PluginError(INSIDE)
        if not self.mode.is_started:
            self._make_way()
        self.load()
        self.mode.reduction.tell_rates([float(rate)])
        count = self.mode.begin(OwnArrays(self._layout, form, inputs, bool(finite)), scaled=scaled)
        self.factor.assign(self.mode.coefficient * self.mode.gain)
        self.gain.assign(self.mode.gain)
        return [np.array(count, np.int32)]


class PartialRun(Run):
    """The optimizer's steps in rounds, with the rounds' updates."""

    _local: Any = None
    """The Local of the last step, which rounds take in between as well; None before the first."""

    def step(self, gradients: Sequence[Any], local: Local) -> None:
        """Hand in the gradients; take a local step for each round since the last call.

        A round sets the learning rate.
        """
        self._local, mine = local, self.told_rate()
        [count] = call(self._hand_in, [mine, *(g for g in gradients if is_dense(g))], [tf.int32], [()])
        repeat(count, self._apply_round)
        self._set_rate(mine)

    def synchronize(self) -> None:
        """Serve rounds until all ranks are here, and apply them as they end. Collective."""
        if self._local is None:
            return
        mine = self.told_rate()
        for count in self.mode.synchronize():
            for number in range(count):
                self._apply_round(tf.constant(number))
        self._set_rate(mine)
        for index, tensor in enumerate(self.tensors if self.mode.drifts else ()):
            tensor.assign(allreduce(tensor, op=hvd.Average, name=f"horovod_oktopk.model.{index}",
                                    process_set=self._process_set))

    def _hand_in(self, rate: Array, *arrays: Array) -> list[Array]:
        self.load()
        count = self.mode.begin(DenseArrays(self._layout, arrays), [float(rate)])
        return [np.array(count, np.int32)]

    def _set_rate(self, value: tf.Tensor) -> None:
        rate = self._rate()
        if rate is not None:
            rate.assign(tf.cast(value, rate.dtype))

    def _apply_round(self, number: tf.Tensor) -> None:
        entries = self._layout.entries
        of_round, *dense = call(self._next, [number], [tf.float64, *(dtype for *_, dtype in entries)],
                                [(), *(shape for _, shape, _ in entries)])
        self._set_rate(of_round)
        remaining = iter(dense)
        self._local([next(remaining) if each else None for each in self._dense])

    def _next(self, _: Array) -> list[Array]:
        gradients = DenseArrays(self._layout, ())
        [rate] = self.mode.prepare(gradients)
        return [np.array(rate), *gradients.written]


def runs_over(key: tuple[int, ...]) -> list[StepAheadRun]:
    """Return the runs that hold parameters, and train one of the key's variables, whatever optimizer has them."""
    wanted = set(key)
    return [run for each in list(ALL) if each.kind.reads_memory for known, run in each.present().items()
            if not wanted.isdisjoint(known)]


class Handover:
    """Hands variables over from StepAhead to an optimizer that reduces densely; for graphs, which need an object."""

    def take_over(self, variables: Sequence[Any]) -> None:
        """Have the variables hold what all ranks share, if they are StepAhead's when this step is traced."""
        key = key_of(variables)
        if runs_over(key):
            call(self._take_over, [], touched=list(map(tensor_of, variables)), given=(key,))

    def _take_over(self, key: tuple[int, ...]) -> None:
        for run in runs_over(key):
            run.give_way()
            for tensor in run.tensors:
                tensor._oktopk_runs = None


HANDOVER = Handover()


@cache
def _turn() -> tf.Variable:
    """Return a variable that every step touches: so TensorFlow takes all steps of a graph in the program's order.

    Otherwise ranks could take those of two optimizers in different orders, and wait for each other.
    """
    with tf.init_scope():
        turn: tf.Variable = tf.Variable(0.0, trainable=False, name="step_ahead_turn")
    return turn
