"""A distributed tape: another view of the user's own tf.GradientTape, whose class reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.schemes import as_options
from horovod_oktopk.tensorflow import amp
from horovod_oktopk.tensorflow.operations import refuse_replicas
from horovod_oktopk.tensorflow.registry import runs_of_tapes
from horovod_oktopk.tensorflow.tensors import (
    is_dense,
    mark_reduced,
    values_in,
    with_scale,
    with_values,
    without_scale,
)
from horovod_oktopk.tensorflow.variables import refuse_overwritten, tensor_of

NO_TAPE = ("a tape has no step to take, and {name} acts at an optimizer's step: use hvd.DistributedOptimizer around "
           "a Keras optimizer, or OkTopk with a tape")
DIFFERENTIATED = ("what a distributed tape returns cannot be differentiated, as the exchange has no derivative: take "
                  "the inner gradient from a plain tf.GradientTape, and distribute the outer tape")
ROWS = ("a distributed tape takes no jacobian, each row of which would be reduced as the gradient of a step: take it "
        "from the plain tf.GradientTape, and reduce it by hvd.allreduce")


class DistributedTape:
    """The part that comes before a tape's own class. It has all attributes in common with the user's tape.

    `view_of` gives each tape's class what is below.
    """

    _reduced: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    _local_sources: set[Any]
    _trains_densely: bool

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of this variable unreduced; but divide it by P, if scale_local_gradients."""
        self._local_sources.add(tensor_of(source).ref())

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None,
                 use_generic_names: bool = False, **kwargs: Any) -> Any:  # noqa: ARG002 (Horovod's, without effect)
        """Return the reduced gradients of a target by variables; see tf.GradientTape.gradient."""
        given = tf.nest.flatten(sources)
        refuse_overwritten(given)
        variables = list(map(tensor_of, given))
        gradients = super().gradient(target, variables, output_gradients, **kwargs)  # type: ignore[misc]
        reduced = self._reduced_scaled(gradients, variables, target)
        is_flat = isinstance(sources, list | tuple) and not any(map(tf.nest.is_nested, sources))
        return reduced if is_flat else tf.nest.pack_sequence_as(sources, reduced)

    def _reduced_scaled(self, gradients: Sequence[Any], variables: Sequence[Any], loss: Any) -> list[Any]:
        """Return the reduced gradients of a loss, which may hold a scale."""
        if self._trains_densely:  # as Horovod's tape does: the scale stays, and an optimizer reduces once more
            return self._reduced(gradients, variables)
        scale = amp.scale_of_loss(loss)
        reduced = with_scale(self._reduced(without_scale(gradients, scale), variables), scale)
        mark_reduced(reduced)
        return reduced

    def jacobian(self, *_: Any, **__: Any) -> NoReturn:
        """Raise PluginError: each row would be reduced as a step's gradient."""
        raise PluginError(ROWS)

    batch_jacobian = jacobian

    def get_local_and_global_gradients(self, target: Any, sources: Any, output_gradients: Any = None,
                                       use_generic_names: bool = False) -> tuple[list[Any], list[Any]]:
        """Return (variable, gradient) of local variables, and of all others; as Horovod's tape does."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        found: dict[bool, list[Any]] = {True: [], False: []}
        for source, gradient in zip(sources, gradients, strict=True):
            found[tensor_of(source).ref() in self._local_sources].append((source, gradient))
        return found[True], found[False]


def distribute(gradtape: tf.GradientTape, compression: Any, op: Any, process_set: Any, sparse_as_dense: bool,
               scale_local_gradients: bool) -> tf.GradientTape:
    """Return a view of a tape, which reduces the gradients; the tape itself gives this rank's own.

    The arguments are those of hvd.DistributedGradientTape. Tapes share their runs, and each has a density of its own.
    """
    refuse_replicas()
    options = as_options(compression)
    if not hasattr(options, "density"):
        raise PluginError(NO_TAPE.format(name=type(options).__name__))
    runs = runs_of_tapes(options, op, process_set, sparse_as_dense)
    reduce = partial(_without_derivative, partial(runs.reduce_before_step, density=options.present_density))
    return view_of(gradtape, reduce, process_set if scale_local_gradients else None)


def view_of(gradtape: tf.GradientTape, reduce: Any, divide_by: Any, trains_densely: bool = False) -> tf.GradientTape:
    """Return a view of a tape, whose gradients `reduce` reduces: Horovod's function if it `trains_densely`."""
    plain = next(cls for cls in type(gradtape).__mro__ if not issubclass(cls, DistributedTape))
    local: set[Any] = set()
    cls = type(plain.__name__, (DistributedTape, plain), {
        "__module__": plain.__module__, "_trains_densely": trains_densely, "_local_sources": local,
        "_reduced": staticmethod(partial(reduced_but_local, reduce, local=local, divide_by=divide_by))})
    view: tf.GradientTape = object.__new__(cls)
    view.__dict__ = vars(gradtape)
    return view


def _without_derivative(reduce: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the reduced gradients, by which TensorFlow refuses an outer tape that differentiates them."""
    reduced = reduce(gradients, variables)
    dense = [index for index, each in enumerate(reduced) if is_dense(each)]
    if not dense:
        return list(reduced)
    passed = tf.identity_n([*(reduced[index] for index in dense), *values_in(gradients)])  # a path from the variables
    given = {index: tf.raw_ops.PreventGradient(input=each, message=DIFFERENTIATED)
             for index, each in zip(dense, passed, strict=False)}
    return [given.get(index, each) for index, each in enumerate(reduced)]


def reduced_but_local(reduce: Any, gradients: Sequence[Any], variables: Sequence[Any], local: set[Any],
                      divide_by: Any) -> list[Any]:
    """Return the gradients, reduced but for those of local variables.

    Those are divided by the size of the process set `divide_by`, if there is one. Raise PluginError if there is not
    one gradient for each variable.
    """
    if len(variables) != len(gradients):
        raise PluginError(f"expected a gradient for each variable; got {len(gradients)} gradients and "
                          f"{len(variables)} variables. Give as many, None for those without")
    is_local = [tensor_of(variable).ref() in local for variable in variables]
    shared = [index for index, each in enumerate(is_local) if not each]
    outputs = reduce([gradients[index] for index in shared], [variables[index] for index in shared])
    found = dict(zip(shared, outputs, strict=True))
    size = divide_by.size() if divide_by is not None and any(is_local) else 1
    return [found[index] if index in found else with_values(gradient, lambda values: values / size)
            for index, gradient in enumerate(gradients)]
