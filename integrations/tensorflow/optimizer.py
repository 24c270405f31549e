"""A distributed Keras optimizer, of either Keras: the user's own object, with a class of its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.step_ahead.pace import normalizes
from horovod_oktopk.tensorflow import amp
from horovod_oktopk.tensorflow.private import KERAS_3, built_with
from horovod_oktopk.tensorflow.registry import Runs
from horovod_oktopk.tensorflow.run import Local, Run
from horovod_oktopk.tensorflow.tape import are_reduced, reduced_but_local
from horovod_oktopk.tensorflow.tensors import with_scale, without_scale
from horovod_oktopk.tensorflow.variables import refuse_overwritten, tensor_of

logger = logging.getLogger("horovod_oktopk")

COPIED = ("a distributed optimizer cannot be copied or pickled: give DistributedOptimizer a plain one of the same "
          "configuration, keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))")

OWN = ("the model holds rank {rank}'s own parameters now, ahead of those that all ranks share, and would be saved or "
       "loaded with them: save and load inside `with shared_parameters(model):`. Inside model.fit the callback "
       "hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), first in the list, does it at the end of an epoch, "
       "and hvd_keras.callbacks.SharedParameters(callback) around another callback in the middle of one")
NO_CALLBACK = ("model.fit has shown this rank's own parameters to validation and callbacks, and not those that all "
               "ranks share: give it hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), first in the list")
CONFIGURED = ("a configuration of the optimizer was asked for while the model holds this rank's own parameters. If "
              "the model is saved now, write: with shared_parameters(model): ...")


class Steps:
    """The steps of one distributed optimizer. It belongs to the optimizer, and does not hold it.

    runs: None with one of Horovod's own compressions. reduce: reduces gradients of variables, before a step.
    passes: gradients of so many passes are added up; average: and divided by their number.
    """

    def __init__(self, runs: Runs | None, reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
                 process_set: Any, passes: int, average: bool, scale_local_gradients: bool,
                 sparse_as_dense: bool) -> None:
        self.runs = runs
        self._reduce = reduce
        self._local_variables: set[Any] = set()
        self._divide_by = process_set if scale_local_gradients else None
        self._passes = None if passes == 1 else LocalGradientAggregationHelperEager(
            passes, self._reduced, sparse_as_dense, average, process_set, False)
        self._has_warned = False
        self._is_inside = False  # in a step, or while that is traced
        self._present: Run | None = None  # whose step that is, if it takes a part of the learning rate

    def add_local(self, variable: Any) -> None:
        """Leave the gradient of this variable unreduced."""
        if self.runs is not None:
            self.runs.kind.check("local")
        self._local_variables.add(tensor_of(variable).ref())

    def take(self, gradients: Sequence[Any], variables: Sequence[Any], local: Local, *, scale: Any = None,
             checks_overflow: bool = False, all_variables: Sequence[Any] | None = None, rate: Any = None,
             skip: Callable[[], object] = lambda: None) -> None:
        """Take a step: reduce the gradients, as the mode has it, and call `local` as often as it says.

        scale: the loss scale that the gradients hold. checks_overflow: True if `local` looks for overflow by itself.
        all_variables: all that the optimizer was built with. rate: the learning rate, if it is a variable.
        skip: is called in a pass whose gradients are only added up.
        """
        refuse_overwritten(variables)
        kind = None if self.runs is None else self.runs.kind
        if self._is_inside or (are_reduced(gradients) and not (kind and kind.acts_at_step)):
            local(list(gradients))
            return
        if checks_overflow and kind is not None:
            kind.check("scaler")
        gradients = without_scale(gradients, scale)
        act = functools.partial(self._act, variables, local, scale, checks_overflow, all_variables, rate)
        if self._passes is None:
            act(self._reduced(gradients, variables))
            return
        given = self._passes.compute_gradients(tuple(gradients), tuple(map(tensor_of, variables)))
        tf.cond(tf.equal(self._passes.counter, 0), lambda: _done(act(given)), lambda: _done(skip()))

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return reduced_but_local(self._reduce, gradients, variables, self._local_variables, self._divide_by)

    def _act(self, variables: Sequence[Any], local: Local, scale: Any, checks_overflow: bool,
             all_variables: Sequence[Any] | None, rate: Any, gradients: Sequence[Any]) -> None:
        def step(given: list[Any]) -> None:
            with self._inside(all_variables or variables):
                local(with_scale(given, scale))

        if self.runs is None:
            step(list(gradients))
        else:
            self.runs.step(all_variables or variables, gradients, variables, step, checks_overflow, rate)

    @contextmanager
    def _inside(self, variables: Sequence[Any]) -> Iterator[None]:
        runs = self.runs
        if runs is not None and runs.kind.reads_memory and runs.takes_part:
            self._present = runs.run_over(variables)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside, self._present = False, None

    # What the optimizer asks.

    @property
    def _runs(self) -> list[Run]:
        return [] if self.runs is None else list(self.runs.present().values())

    def finish(self) -> None:
        """Put what all ranks share into the model, until the next step; warn if nobody has done so before."""
        for run in self._runs:
            if run.mode.holds_own:
                logger.warning(NO_CALLBACK)
            run.mode.suspend()

    def check_shared(self) -> None:
        """Raise PluginError while the model holds this rank's own parameters."""
        for run in self._runs:
            if run.mode.holds_own:
                raise PluginError(OWN.format(rank=run.mode.ranks.membership().rank))

    def warn_of_own(self) -> None:
        """Warn, once, while the model holds this rank's own parameters."""
        if not self._has_warned and any(run.mode.holds_own for run in self._runs):
            self._has_warned = True
            logger.warning(CONFIGURED)

    def times_factor(self, learning_rate: Any) -> Any:
        """Return the learning rate that the user has set; inside a step, λ · gain times that."""
        if self._present is None:
            return learning_rate
        rate = tf.convert_to_tensor(learning_rate)
        return rate * tf.cast(self._present.factor, rate.dtype)

    def over_gain(self, weight_decay: Any) -> Any:
        """Return a weight decay that goes by the learning rate; inside a step, divided by the gain."""
        if self._present is None or not weight_decay:
            return weight_decay
        return tf.convert_to_tensor(weight_decay, tf.float32) / self._present.gain


def _done(_: object) -> tf.Tensor:
    return tf.constant(0)


class Decay:
    """A weight decay that goes by the learning rate, as an attribute of a distributed optimizer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        try:
            decay = vars(optimizer)[self._name]
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__} has no {self._name}") from None
        steps = vars(optimizer).get("oktopk")
        return decay if steps is None else steps.over_gain(decay)

    def __set__(self, optimizer: Any, decay: Any) -> None:
        vars(optimizer)[self._name] = decay


class Distributed:
    """The part that comes before a Keras optimizer's own class."""

    oktopk: Steps
    weight_decay = Decay()
    adam_weight_decay = Decay()
    """Muon's, of the variables for which it is Adam."""

    @classmethod
    def from_config(cls, *_: Any, **__: Any) -> Any:
        """Raise PluginError: a file has the name of the plain class, so Keras never calls this."""
        raise PluginError(COPIED)

    def __reduce__(self) -> Any:
        raise PluginError(COPIED)

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of this variable unreduced; but divide it by P, if scale_local_gradients."""
        self.oktopk.add_local(variable)

    @property
    def learning_rate(self: Any) -> Any:
        """The user's learning rate; with StepAhead, while a step is taken, λ · gain times that."""
        return self.oktopk.times_factor(super().learning_rate)  # type: ignore[misc]

    @learning_rate.setter
    def learning_rate(self: Any, rate: Any) -> None:
        super(Distributed, type(self)).learning_rate.fset(self, rate)  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Any) -> None:
        """Put what all ranks share into the model; Keras calls this at the end of `fit`."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        self.oktopk.finish()

    def save_own_variables(self, store: Any) -> None:
        """Save the optimizer. Raise PluginError while the model holds this rank's own parameters."""
        self.oktopk.check_shared()
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Load the optimizer. Raise PluginError while the model holds this rank's own parameters."""
        self.oktopk.check_shared()
        super().load_own_variables(store)  # type: ignore[misc]

    def get_config(self) -> Any:
        """Return the plain optimizer's configuration."""
        self.oktopk.warn_of_own()
        return super().get_config()  # type: ignore[misc]

    if KERAS_3:
        @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
        def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
            """Take a distributed step."""
            update = super().apply  # type: ignore[misc]
            variables = built_with(self) if trainable_variables is None else list(trainable_variables)
            if not self.built:
                self.build(variables)
            self.oktopk.take(list(grads), variables, lambda given: update(given, variables),
                             scale=amp.scale_of(self), all_variables=built_with(self), rate=_rate_of(self))
            amp.forget(self)
    else:
        @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            """Take a distributed step."""
            update, pairs = super().apply_gradients, list(grads_and_vars)  # type: ignore[misc]
            variables = [variable for _, variable in pairs]
            if pairs:
                with tf.init_scope():
                    self.build(variables)
            self.oktopk.take([gradient for gradient, _ in pairs], variables,
                             lambda given: update(zip(given, variables, strict=True), *args, **kwargs),
                             rate=_rate_of(self), skip=lambda: self.iterations.assign_add(1))
            return self.iterations


class Guard(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A part of an optimizer that refuses TensorFlow's checkpoints while the model is not what all ranks share."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def serialize(self) -> str:
        """Return nothing. Raise PluginError while the model holds this rank's own parameters."""
        self._steps.check_shared()
        return ""

    def deserialize(self, string_value: str) -> None:  # noqa: ARG002
        """Raise PluginError while the model holds this rank's own parameters."""
        self._steps.check_shared()


def _rate_of(optimizer: Any) -> tf.Variable | None:
    """Return the learning rate, if it travels with rounds and is a variable.

    A schedule follows the updates, which are the same on all ranks.
    """
    runs = optimizer.oktopk.runs
    if runs is None or not runs.kind.has_rounds:
        return None
    rate = tensor_of(super(Distributed, optimizer).learning_rate)  # type: ignore[misc]
    return rate if isinstance(rate, tf.Variable) else None


def steps_of(optimizer: Any) -> Steps | None:
    """Return the steps of a distributed optimizer, or of the one inside it that loss scaling has wrapped."""
    both = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return next((each.oktopk for each in both if isinstance(each, Distributed)), None)


def normalizes_gradients(optimizer: Any) -> bool:
    """Return True if an optimizer's steps do not grow with its gradients, and a step's gradients can be seen.

    With Keras' own accumulation of gradients a step sees one batch's, and not what is added up.
    """
    return normalizes(type(optimizer)) and not getattr(optimizer, "gradient_accumulation_steps", None)


def distribute(optimizer: Any, options: Any, op: Any = hvd.Average, sparse_as_dense: bool = False, passes: int = 1,
               average_passes: bool = False, process_set: Any = hvd.global_process_set,
               scale_local_gradients: bool = True, reduce: Any = None) -> None:
    """Give an optimizer a class of its own, whose steps are distributed.

    options: of ours; or None, with `reduce`, for what reduces gradients of variables otherwise.
    """
    runs = None
    if options is not None:
        runs = Runs(options, op, process_set, sparse_as_dense, normalizes_gradients(optimizer))
        reduce = runs.reduce
    plain = type(optimizer)
    cls = type(plain.__name__, (Distributed, plain), {"__module__": plain.__module__})
    registered = tf.keras.utils.get_registered_name(plain)
    if registered != plain.__name__:
        package, name = registered.split(">", 1)
        for each in (cls, plain):  # both have the name, and the name stands for the plain one
            tf.keras.utils.register_keras_serializable(package, name)(each)
    optimizer.__class__ = cls
    optimizer.oktopk = Steps(runs, reduce, process_set, passes, average_passes, scale_local_gradients,
                             sparse_as_dense)
    if runs is not None and runs.kind.reads_memory:
        optimizer.oktopk_guard = Guard(optimizer.oktopk)


def install() -> None:
    """Wrap what a distributed optimizer cannot see from inside: the loss scaling around it; once."""
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    name = "apply" if KERAS_3 else "apply_gradients"
    for cls in (scaling,) if KERAS_3 else scaling.__subclasses__():
        method = getattr(cls, name)
        if not hasattr(method, "_oktopk_installed"):
            wrapped = _wrap_scaled_apply(method) if KERAS_3 else _wrap_scaled_apply_gradients(method)
            wrapped._oktopk_installed = True
            setattr(cls, name, wrapped)


def _wrap_scaled_apply(apply: Callable[..., None]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    @functools.wraps(apply)
    def wrapped(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed):
            apply(self, grads, trainable_variables)
            return
        variables = built_with(self) if trainable_variables is None else list(trainable_variables)
        if not self.built:
            self.build(variables)
        inner.oktopk.take(list(grads), variables, lambda given: apply(self, given, variables),
                          scale=amp.scale_of(self), checks_overflow=True, all_variables=built_with(self))
        amp.forget(self)

    return wrapped


def _wrap_scaled_apply_gradients(apply: Callable[..., Any]) -> Any:
    """Wrap tf-keras' scaler, which has taken its scale out already."""
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    @functools.wraps(apply)
    def wrapped(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed):
            return apply(self, grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            self.build(variables)
        inner.oktopk.take([gradient for gradient, _ in pairs], variables,
                          lambda given: apply(self, list(zip(given, variables, strict=True)), *args, **kwargs),
                          checks_overflow=True, skip=lambda: self.iterations.assign_add(1))
        amp.forget(self)
        return self.iterations

    return wrapped
