"""A distributed Keras optimizer, of either Keras: the user's own object, with a class of its own."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.make import kind_of
from horovod_oktopk.modes.step_ahead.pace import normalizes
from horovod_oktopk.tensorflow import amp
from horovod_oktopk.tensorflow.operations import when
from horovod_oktopk.tensorflow.passes import Passes
from horovod_oktopk.tensorflow.private import KERAS_3, built_with, learning_rate_of
from horovod_oktopk.tensorflow.run import HANDOVER, Local, Run, StepAheadRun
from horovod_oktopk.tensorflow.runs import RUNS, GradientRuns, Runs, StepAheadRuns
from horovod_oktopk.tensorflow.state import suspend
from horovod_oktopk.tensorflow.tape import reduced_but_local
from horovod_oktopk.tensorflow.tensors import are_reduced, with_scale, without_scale
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
STOCK = ("Horovod's own DistributedOptimizer reduces nothing under Keras 3, and each rank would train for itself: "
         "give model.compile hvd_keras.DistributedOptimizer(optimizer), or one with a compression")
CONFIGURED = ("a configuration of the optimizer was asked for while the model holds this rank's own parameters. If "
              "the model is saved now, write: with shared_parameters(model): ...")


class Steps:
    """The steps of one distributed optimizer. It belongs to the optimizer, and does not hold it.

    `runs` is None with one of Horovod's own compressions. `reduce` reduces gradients of variables, before a step.
    The gradients of `passes` passes are added up, and divided by their number if `average`.
    """

    def __init__(self, runs: Runs[Any] | None, reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
                 process_set: Any, passes: int, average: bool, scale_local_gradients: bool,
                 sparse_as_dense: bool) -> None:
        self.runs = runs
        self.local_variables: set[Any] = set()
        self._reduced = partial(reduced_but_local, reduce, local=self.local_variables,
                                divide_by=process_set if scale_local_gradients else None)
        self._passes = Passes(passes, average, sparse_as_dense) if passes > 1 else None
        self.has_warned = False  # of a configuration; see CONFIGURED
        self.has_applied = False
        self._is_inside = False  # in a step, or while that is traced
        self.present: StepAheadRun | None = None  # whose step that is, if it takes a part of the learning rate

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], local: Local, *, scale: Any = None,
             checks_overflow: bool, all_variables: Sequence[Any], skip: Callable[[], object]) -> None:
        """Take a step: reduce the gradients, as the mode has it, and call `local` as often as it says.

        The gradients hold the loss scale `scale`; `local` looks for overflow by itself if `checks_overflow`. The
        optimizer was built with `all_variables`. `skip` is called in a pass whose gradients are only added up; half
        of a step's passes hide an exchange.
        """
        self.has_applied = True
        refuse_overwritten(variables)
        if self._is_inside or (isinstance(self.runs, GradientRuns | None) and are_reduced(gradients)):
            local(list(gradients))
            return
        if checks_overflow and self.runs is not None:
            self.runs.kind.check("scaler")
        gradients = without_scale(gradients, scale)

        def step(given: list[Any], run: StepAheadRun | None = None) -> object:
            self._is_inside, self.present = True, run
            try:
                return local(with_scale(given, scale))
            finally:
                self._is_inside, self.present = False, None

        def act(reduced: Sequence[Any]) -> None:
            if self.runs is None:
                HANDOVER.take_over(variables)
            if self.runs is None or not self.runs.takes_part:
                step(list(reduced))
            else:
                self.runs.step(reduced, variables, step, all_variables=all_variables,
                               checks_overflow=checks_overflow)

        passes = self._passes
        if passes is None:
            act(self._reduced(gradients, variables))
            return
        count = passes.add(gradients, variables)
        when(tf.equal(count, passes.number),
             lambda: act(passes.taken(self._reduced, variables)), otherwise=skip)
        if isinstance(self.runs, StepAheadRuns) and self.runs.takes_part:
            run = self.runs.run_over(all_variables)
            when(tf.equal(count, passes.number // 2), run.catch_up)

    def own_runs(self) -> list[Run]:
        """Return the runs whose variables hold this rank's own parameters now."""
        return [] if self.runs is None else [run for run in self.runs.present().values() if run.mode.holds_own]

    def check_shared(self) -> None:
        """Raise PluginError while the model holds this rank's own parameters."""
        for run in self.own_runs():
            raise PluginError(OWN.format(rank=run.mode.reduction.ranks.membership().rank))


def _decay_without_gain(name: str) -> property:
    """Return a property for a weight decay that the optimizer multiplies by its learning rate.

    With StepAhead the learning rate has the gain as a factor during a step, and the decay is divided by it then.
    """
    def read(optimizer: Any) -> Any:
        decay, present = vars(optimizer)[name], optimizer.oktopk.present
        if present is None or not decay:
            return decay
        used = _used(optimizer, super(Distributed, optimizer).learning_rate)  # type: ignore[misc]
        return tf.convert_to_tensor(decay, tf.float64) / tf.cast(present.gain * used, tf.float64)

    def write(optimizer: Any, decay: Any) -> None:
        vars(optimizer)[name] = decay

    return property(read, write)


def _used(optimizer: Any, rate: Any) -> tf.Tensor:
    """Return the part of the learning rate that a step uses, float32: Adafactor takes min(rate, 1/√t).

    So it does of a rate that is multiplied, too: then λ times a gain counts up to 1.
    """
    if not isinstance(optimizer, tf.keras.optimizers.Adafactor):
        return tf.constant(1.0)
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, tf.float32)
    return tf.minimum(1.0, tf.math.rsqrt(step) / tf.cast(rate, tf.float32))


DECAYS = ("weight_decay", "adam_weight_decay")
"""The latter is Muon's, of the variables for which it is Adam."""


class Distributed:
    """The part that comes before a Keras optimizer's own class."""

    oktopk: Steps

    @classmethod
    def from_config(cls, *_: Any, **__: Any) -> Any:
        """Raise PluginError: a file has the name of the plain class, so Keras never calls this."""
        raise PluginError(COPIED)

    def __reduce__(self) -> Any:
        raise PluginError(COPIED)

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of this variable unreduced; but divide it by P, if scale_local_gradients."""
        if self.oktopk.runs is not None:
            self.oktopk.runs.kind.check("local")
        self.oktopk.local_variables.add(tensor_of(variable).ref())

    @property
    def learning_rate(self: Any) -> Any:
        """The user's learning rate; with StepAhead, while a step is taken, λ · gain times what it uses of that."""
        rate, present = super().learning_rate, self.oktopk.present  # type: ignore[misc]
        if present is None:
            return rate
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(present.factor * _used(self, rate), rate.dtype)

    @learning_rate.setter
    def learning_rate(self: Any, rate: Any) -> None:
        super(Distributed, type(self)).learning_rate.fset(self, rate)  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Any) -> None:
        """Put what all ranks share into the model, until the next step; Keras calls this at the end of `fit`."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        if self.oktopk.own_runs():
            logger.warning(NO_CALLBACK)
        suspend(self)

    def save_own_variables(self, store: Any) -> None:
        self.oktopk.check_shared()
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        self.oktopk.check_shared()
        super().load_own_variables(store)  # type: ignore[misc]

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        """Return what TensorFlow's checkpoints save, or are read into; they ask for it before they do."""
        self.oktopk.check_shared()
        return super()._trackable_children(*args, **kwargs)  # type: ignore[misc]

    def get_config(self) -> Any:
        if not self.oktopk.has_warned and self.oktopk.own_runs():
            self.oktopk.has_warned = True
            logger.warning(CONFIGURED)
        return super().get_config()  # type: ignore[misc]

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def oktopk_apply(self, *args: Any, **kwargs: Any) -> Any:
        return _apply(self, self, getattr(super(), APPLY), *args, **kwargs)


APPLY = "apply" if KERAS_3 else "apply_gradients"
setattr(Distributed, APPLY, Distributed.oktopk_apply)


def _rate_of(kept: weakref.ref[Any]) -> tf.Variable | None:
    """Return an optimizer's learning rate, if it is a variable.

    A schedule follows the updates, which are the same on all ranks.
    """
    optimizer = kept()
    rate = tensor_of(learning_rate_of(getattr(optimizer, "inner_optimizer", optimizer)))
    return rate if isinstance(rate, tf.Variable) else None


def is_distributed(optimizer: Any) -> bool:
    """Return True for a distributed optimizer, ours or stock Horovod's, or loss scaling around it."""
    return any(isinstance(each, Distributed) or hasattr(each, "_allreduce_grads") for each in _and_inner(optimizer))


def refuse_stock(optimizers: Sequence[Any]) -> None:
    """Raise PluginError for an optimizer that stock Horovod has distributed, if Keras 3 never lets it reduce."""
    if KERAS_3 and any(hasattr(each, "_allreduce_grads") for one in optimizers for each in _and_inner(one)):
        raise PluginError(STOCK)


def steps_unseen(optimizers: Sequence[Any]) -> int:
    """Return how many steps were taken of distributed optimizers that have not been asked for one as such."""
    steps: list[Any] = [each.iterations for one in optimizers for each in _and_inner(one)
                        if hasattr(each, "oktopk") and not each.oktopk.has_applied]
    return sum(int(tensor_of(each)) for each in steps)


def _and_inner(optimizer: Any) -> list[Any]:
    """Return an optimizer, and the one inside it if it scales losses."""
    return [optimizer, getattr(optimizer, "inner_optimizer", None)]


def distribute(optimizer: Any, options: Any, dense: Any, op: Any, sparse_as_dense: bool, passes: int,
               average_passes: bool, process_set: Any, scale_local_gradients: bool) -> None:
    """Give an optimizer a class of its own, whose steps are distributed; `dense` reduces if there are no options."""
    runs = None
    if options is None:
        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
            return list(dense(list(gradients), list(map(tensor_of, variables))))
    else:
        # With Keras' own accumulation of gradients a step sees one batch's, and not what is added up.
        is_normalizing = normalizes(type(optimizer)) and not getattr(optimizer, "gradient_accumulation_steps", None)
        runs = RUNS[kind_of(options)](options, op, process_set, sparse_as_dense, is_normalizing,
                                      partial(_rate_of, weakref.ref(optimizer)))
        reduce = runs.reduce_before_step
    optimizer.oktopk = Steps(runs, reduce, process_set, passes, average_passes, scale_local_gradients,
                             sparse_as_dense)
    plain = type(optimizer)
    decays = {name: _decay_without_gain(name) for name in DECAYS if name in vars(optimizer)}
    cls = type(plain.__name__, (Distributed, plain), {"__module__": plain.__module__, **decays})
    registered = tf.keras.utils.get_registered_name(plain)
    if registered != plain.__name__:
        package, name = registered.split(">", 1)
        for each in (cls, plain):  # both have the name, and the name stands for the plain one
            tf.keras.utils.register_keras_serializable(package, name)(each)
    optimizer.__class__ = cls


def wrap_scalers() -> None:
    """Wrap what a distributed optimizer cannot see from inside: the loss scaling around it."""
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    for cls in [scaling] if KERAS_3 else scaling.__subclasses__():
        setattr(cls, amp.SCALE, amp.wrap_scale_loss(getattr(cls, amp.SCALE)))
        setattr(cls, APPLY, _wrap_scaled(getattr(cls, APPLY)))


def _wrap_scaled(apply: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    @wraps(apply)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.inner_optimizer, Distributed):
            return apply(self, *args, **kwargs)
        return _apply(self, self.inner_optimizer, partial(apply, self), *args, **kwargs)

    return wrapped


if KERAS_3:
    def _apply(asked: Any, inner: Any, update: Callable[..., Any], grads: Sequence[Any],
              trainable_variables: Any = None) -> None:
        """Take a distributed step of an optimizer.

        `asked` is it, or the scaler around it, as which it is to be applied; `update` is the plain method of that.
        """
        variables = built_with(asked) if trainable_variables is None else list(trainable_variables)
        if not asked.built:
            asked.build(variables)
        inner.oktopk.apply(list(grads), variables, lambda given: update(given, variables), scale=amp.scale_of(asked),
                          checks_overflow=asked is not inner, all_variables=built_with(asked),
                          skip=lambda: tensor_of(inner.iterations).assign_add(1))
        amp.forget(asked)
else:
    def _apply(asked: Any, inner: Any, update: Callable[..., Any], grads_and_vars: Any,  # type: ignore[misc]
              *args: Any, **kwargs: Any) -> Any:
        """Take a distributed step; see above. A scaler of tf-keras has taken its scale out already."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if pairs:
            with tf.init_scope():
                asked.build(variables)
        inner.oktopk.apply([gradient for gradient, _ in pairs], variables,
                          lambda given: update(list(zip(given, variables, strict=True)), *args, **kwargs),
                          checks_overflow=asked is not inner, all_variables=variables,
                          skip=lambda: asked.iterations.assign_add(1))
        amp.forget(asked)
        return asked.iterations
