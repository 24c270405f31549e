"""Keras 3: an optimizer that reduces gradients before it applies them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

from horovod_oktopk.errors import PluginError
from horovod_oktopk.partial.options import Partial
from horovod_oktopk.schemes.inner import as_options
from horovod_oktopk.step_ahead.options import StepAhead
from horovod_oktopk.tensorflow import amp
from horovod_oktopk.tensorflow.keras.partial import PartialGradientReducer
from horovod_oktopk.tensorflow.local_step import Pairs, normalizes_gradients
from horovod_oktopk.tensorflow.models import check_optimizer
from horovod_oktopk.tensorflow.reducer import refuse_replicas
from horovod_oktopk.tensorflow.registry import GradientReducer, refuse_overwritten, tensor_of
from horovod_oktopk.tensorflow.step_ahead import DecoupledDecay, OwnSteps
from horovod_oktopk.tensorflow.versions import KERAS


def DistributedOptimizer(optimizer: Any, *, compression: Any = hvd.Compression.none,  # noqa: N802 (Horovod's name)
                         op: Any = hvd.Average, sparse_as_dense: bool = False, backward_passes_per_step: int = 1,
                         average_aggregated_gradients: bool = False, process_set: Any = hvd.global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """Makes a Keras 3 optimizer reduce gradients over the ranks, and returns it: it is changed in place.

    A saved model, and a model's copy, hold the plain optimizer; see `load_model`. The arguments after `compression`
    are those of horovod.tensorflow.keras.DistributedOptimizer, which also has names, devices, groups and predivision.

    Args:
        optimizer: an optimizer of Keras 3.
        compression: `OkTopk(...)`, `StepAhead(...)`, `Partial(...)`, or one of Horovod's for a dense allreduce.
        op: `hvd.Average` or `hvd.Sum`.
        sparse_as_dense: reduce sparse gradients (tf.IndexedSlices) as dense ones.
        backward_passes_per_step: gradients of so many passes are added up locally before they are reduced.
        average_aggregated_gradients: divide what was added up by the number of passes.
        process_set: the ranks that reduce together.
        scale_local_gradients: divide the gradients of variables that are not reduced by the number of ranks.

    Returns:
        The optimizer that was given.

    Raises:
        PluginError: It is no Keras 3 optimizer, or is distributed already; or in a scope of tf.distribute.
        OptionError: The compression is none of these.

    Examples:
        >>> optimizer = hvd_keras.DistributedOptimizer(
        ...     keras.optimizers.SGD(0.1), compression=hvd_keras.OkTopk(density=0.01))
    """
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise PluginError(f"expected an optimizer of {KERAS}; got {optimizer!r}")
    if is_distributed(optimizer):
        raise PluginError(f"{type(optimizer).__name__} is distributed already: wrap an optimizer once")
    options, given = as_options(compression), optimizer
    if isinstance(options, StepAhead) and isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer  # it takes the steps, whose wrapper looks first
    if options is not None:
        refuse_replicas()
        check_optimizer(optimizer, options)
    if isinstance(options, Partial):
        _check_partial(optimizer, backward_passes_per_step)
    plain = type(optimizer)
    optimizer.__class__ = _distributed_class(plain)
    optimizer._allreduce_grads = (
        PartialGradientReducer(options, op, process_set, sparse_as_dense, optimizer)
        if isinstance(options, Partial) else
        hvd._make_allreduce_grads_fn(f"Distributed{plain.__name__}", "", "", compression, sparse_as_dense, op, 1.0,
                                     None, process_set))
    if isinstance(optimizer._allreduce_grads, OwnSteps):
        optimizer._allreduce_grads.normalizes = normalizes_gradients(optimizer)
    optimizer._aggregation = None if backward_passes_per_step == 1 else LocalGradientAggregationHelperEager(
        backward_passes_per_step, optimizer._allreduce_grads, sparse_as_dense, average_aggregated_gradients,
        process_set, scale_local_gradients)
    optimizer._process_set, optimizer._scale_local_gradients = process_set, scale_local_gradients
    optimizer._local_vars, optimizer._is_reduced = set(), False
    return given


def _distributed_class(plain: type) -> type:
    """The class of one distributed optimizer, which Keras writes into files as the plain one."""
    cls = type(plain.__name__, (_Distributed, plain), {"__module__": plain.__module__})
    saving = tf.keras.utils
    registered = saving.get_registered_name(plain)
    if registered != plain.__name__:
        package, name = registered.split(">", 1)
        for each in (cls, plain):  # both have the name, and the name stands for the plain one
            saving.register_keras_serializable(package, name)(each)
    return cls


def load_model(filepath: Any, custom_objects: Any = None, **arguments: Any) -> Any:
    """keras.models.load_model, with the optimizer made distributed.

    Args:
        filepath: the saved model.
        custom_objects: as in keras.models.load_model.
        **arguments: those of `DistributedOptimizer`.

    Returns:
        The model.

    Raises:
        PluginError: The model has no optimizer.

    Examples:
        >>> model = hvd_keras.load_model(
        ...     "model.keras", compression=hvd_keras.OkTopk(density=0.01))
    """
    model = tf.keras.models.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is None:
        raise PluginError(f"the model in {filepath} has no optimizer: compile it with a distributed one")
    DistributedOptimizer(model.optimizer, **arguments)
    model.jit_compile = False
    return model


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer, or the one inside it that loss scaling has wrapped, reduces gradients."""
    both = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return any(isinstance(each, _Distributed) for each in both)


def install() -> None:
    """Wraps Keras' names: what a distributed optimizer cannot see from inside."""
    keras = tf.keras
    scaling = keras.mixed_precision.LossScaleOptimizer
    if not hasattr(scaling.apply, "_oktopk_installed"):
        scaling.apply = _wrap_scaled_apply(scaling.apply)
        owner = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
        owner.compile = _wrap_compile(owner.compile)
        owner = next(cls for cls in keras.optimizers.Optimizer.__mro__ if "__reduce__" in vars(cls))
        owner.__reduce__ = _wrap_reduce(owner.__reduce__)


class _Distributed:
    """Comes before a Keras optimizer's own class."""

    _allreduce_grads: Any
    _aggregation: Any
    _process_set: Any
    _scale_local_gradients: bool
    _local_vars: set[Any]
    _is_reduced: bool
    weight_decay = DecoupledDecay()
    adam_weight_decay = DecoupledDecay()
    """Muon's, of the variables for which it is Adam."""

    @classmethod
    def from_config(cls, *_: Any, **__: Any) -> Any:
        """Raise PluginError: a file has the name of the plain class, so Keras never calls this."""
        raise PluginError(COPIED)

    def register_local_var(self: Any, variable: Any) -> None:
        """The gradient of this variable is not reduced (but divided by P, if scale_local_gradients)."""
        if isinstance(self._allreduce_grads, PartialGradientReducer | OwnSteps):
            raise PluginError("a local variable cannot be used with Partial, whose steps apply several updates, or "
                              "none, nor with StepAhead, which shares all variables of an optimizer: give local "
                              "layers an optimizer of their own")
        if self._aggregation is not None:
            self._aggregation.register_local_var(tensor_of(variable))
        self._local_vars.add(tensor_of(variable).ref())

    @property
    def learning_rate(self: Any) -> Any:
        """As the user has set it; with StepAhead, while a step is taken, times λ · gain."""
        rate = super().learning_rate  # type: ignore[misc]
        return self._allreduce_grads.times_coefficient(rate) if isinstance(self._allreduce_grads, OwnSteps) else rate

    @learning_rate.setter
    def learning_rate(self: Any, rate: Any) -> None:
        super(_Distributed, type(self)).learning_rate.fset(self, rate)  # type: ignore[misc]

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduces the gradients, and applies them; with StepAhead it applies them as they are."""
        update = super().apply  # type: ignore[misc]
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        refuse_overwritten(variables)
        if self._is_reduced:
            if isinstance(self._allreduce_grads, OwnSteps):
                self._allreduce_grads.observe(list(zip(grads, variables, strict=True)))
            update(grads, trainable_variables)
            return
        if not self.built:
            self.build(variables)
        if isinstance(self._allreduce_grads, PartialGradientReducer):
            self._allreduce_grads.apply(grads, variables, lambda reduced: update(reduced, variables))
            return
        with amp.gradients_for(self):
            reduced = self.reduce(grads, variables)
        take = functools.partial(self._take, list(zip(reduced, variables, strict=True)),
                                 lambda: update(reduced, variables))
        if self._aggregation is None:
            take()
        else:
            tf.cond(tf.equal(self._aggregation.counter, 0), lambda: _nothing(take()), _nothing)

    def _take(self: Any, pairs: Pairs, update: Callable[[], object]) -> None:
        """The optimizer's own step. pairs: none where `update` looks for overflow by itself."""
        if isinstance(self._allreduce_grads, OwnSteps):
            self._allreduce_grads.step(self._trainable_variables, pairs, update)
        else:
            update()

    def reduce(self: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, reduced but for those of local variables."""
        if self._aggregation is not None:
            return list(self._aggregation.compute_gradients(tuple(grads), tuple(map(tensor_of, variables))))
        reduced = list(grads)
        shared = [i for i, v in enumerate(variables) if tensor_of(v).ref() not in self._local_vars]
        given = [variables[i] for i in shared]
        if not isinstance(self._allreduce_grads, GradientReducer):  # Horovod's own does not know Keras 3's variables
            given = [tensor_of(variable) for variable in given]
        outputs = self._allreduce_grads([grads[i] for i in shared], given)
        for index, output in zip(shared, outputs, strict=True):
            reduced[index] = output
        if self._scale_local_gradients:
            for index in set(range(len(reduced))) - set(shared):
                if reduced[index] is not None:
                    reduced[index] = reduced[index] / self._process_set.size()
        return reduced


COPIED = ("a distributed optimizer cannot be copied or pickled: give DistributedOptimizer a plain one of the same "
          "configuration, keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))")
NO_SCALING = ("a LossScaleOptimizer cannot be used with Partial: its scale would have to be one for all ranks, whose "
              "steps differ. bfloat16 needs none")


def _check_partial(optimizer: Any, backward_passes_per_step: int) -> None:
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        raise PluginError(NO_SCALING)
    if backward_passes_per_step != 1:
        raise PluginError("Partial takes backward_passes_per_step=1; got "
                          f"{backward_passes_per_step!r}. Keras' gradient_accumulation_steps can be used")


def _nothing(*_: Any) -> tf.Tensor:
    return tf.constant(0)


def _wrap_scaled_apply(apply: Callable[..., None]) -> Callable[..., None]:
    """A loss-scaling optimizer around ours: gradients are reduced before each rank looks for overflow, not after."""
    @functools.wraps(apply)
    def wrapped(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        inner = self.inner_optimizer
        if not isinstance(inner, _Distributed):
            apply(self, grads, trainable_variables)
            return
        if isinstance(inner._allreduce_grads, PartialGradientReducer):
            raise PluginError(NO_SCALING)
        if inner._aggregation is not None:
            raise PluginError("backward_passes_per_step needs DistributedOptimizer(LossScaleOptimizer(...)), not the "
                              "other way round")
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            self.build(variables)
        with amp.gradients_for(self):
            reduced = inner.reduce(grads, variables)
        inner._is_reduced = True
        try:
            inner._take([], lambda: apply(self, reduced, variables))
        finally:
            inner._is_reduced = False

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    return wrapped


def _wrap_reduce(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What copies and pickles Keras' objects, in a file that holds the plain optimizer."""
    @functools.wraps(reduce)
    def wrapped(self: Any) -> Any:
        if is_distributed(self):
            raise PluginError(COPIED)
        return reduce(self)

    return wrapped


def _wrap_compile(compile_model: Callable[..., None]) -> Callable[..., None]:
    """Model.compile, where jit_compile="auto" must not choose XLA, which cannot compile a collective.

    experimental_run_tf_function, which Horovod's examples give, is without effect, as in tf-keras.
    """
    signature = inspect.signature(compile_model)

    @functools.wraps(compile_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        known = {name: value for name, value in kwargs.items() if name != "experimental_run_tf_function"}
        try:
            call = signature.bind(self, *args, **known)
        except TypeError:  # Keras says it better
            compile_model(self, *args, **kwargs)
            return
        call.apply_defaults()
        if not is_distributed(call.arguments["optimizer"]):
            compile_model(self, *args, **kwargs)
        else:
            if call.arguments["jit_compile"] not in ("auto", False, None):
                raise PluginError("XLA cannot compile a training step that reduces gradients: use "
                                  "model.compile(..., jit_compile=False), or 'auto'")
            call.arguments["jit_compile"] = False
            compile_model(*call.args, **call.kwargs)

    return wrapped
