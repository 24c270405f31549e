"""Which gradient reducers serve an optimizer, a model, or the variables that tapes differentiate by.

An optimizer has a GradientReducer of its own. Tapes are made anew at every step, so theirs are found by what was
asked for, and by the variables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.reducer import checkpoint
from horovod_oktopk.reducer.checks import check_arguments
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.tensorflow.models import optimizers_of
from horovod_oktopk.tensorflow.reducer import Reducer, Signature, check_place, describe, is_dense, name_of

_ALL: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
_OF_TAPES: dict[Any, GradientReducer] = {}
_EXPECTED: list[_Expected] = []


class Served(Protocol):
    """What serves one list of variables: a Reducer, or a StepAheadReducer."""

    before_step: Callable[[Any], None] | None

    @property
    def flat(self) -> Any: ...


S = TypeVar("S", bound=Served)


class GradientReducer:
    """What takes the place of Horovod's allreduce_grads: one Reducer for each list of variables.

    sparse: Horovod's own function, for IndexedSlices.
    """

    def __init__(self, options: Scheme, op: Any, process_set: Any, sparse_as_dense: bool, sparse: Any) -> None:
        check_arguments(hvd, op)
        self.options = options
        self.op = op
        self.process_set = process_set
        self.reducers: dict[tuple[int, ...], Served] = {}
        """By the identities of the variables. They go with these: what only a tape has, holds none of them. An
        optimizer's may hold its variables, as the optimizer does."""
        self._sparse_as_dense = sparse_as_dense
        self._sparse = sparse
        _ALL.add(self)

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the process set; if not, its gradients stay as they are, as in stock."""
        return bool(self.process_set.included())

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any] | None = None,
                 use_generic_names: bool = False, density: float | None = None) -> list[Any]:
        """The reduced gradients; None where there is none. vars: the gradients' tf.Variables. density: a tape's."""
        if not self.takes_part:
            return list(grads)
        check_place()
        variables = [tensor_of(v) for v in vars or ()]
        _check_variables(variables, grads)
        with tf.name_scope("OkTopkAllreduce"):
            if self._sparse_as_dense:
                grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
            outputs = list(grads)
            dense = [index for index, g in enumerate(grads) if is_dense(g)]
            slices = [i for i, g in enumerate(grads) if isinstance(g, tf.IndexedSlices)]
            reducer, signature, reason = self.reducer_for(list(vars or ()), grads)
            given = [grads[i] for i in dense]
            reduced = (reducer.refuse(given, signature, reason) if reason else
                       reducer.reduce(given, [grads[i] for i in slices], density))
            for index, gradient in zip(dense, reduced, strict=True):
                outputs[index] = gradient
            if slices:
                with tf.control_dependencies(reduced):  # the roll call comes first: then no rank waits in vain
                    gathered = self._sparse([grads[i] for i in slices], [variables[i] for i in slices],
                                            use_generic_names)
                for index, gradient in zip(slices, gathered, strict=True):
                    outputs[index] = gradient
            return outputs

    def reducer_for(self, variables: list[Any], grads: Sequence[Any]) -> tuple[Reducer, Signature, str | None]:
        """That of these variables, the gradients' description, and why the reducer cannot take them, if so."""
        key = tuple(id(tensor_of(variable)) for variable in variables)
        signature = describe(variables, grads)
        reducer = self.reducers.get(key)
        if reducer is None:
            for known, other in self.present_reducers().items():
                if set(known) & set(key):
                    assert isinstance(other, Reducer)
                    return other, signature, _other_variables(other.signature, signature)
            reducer = self._add(key, self._make(variables, grads), variables)
        assert isinstance(reducer, Reducer)
        if reducer.signature == signature:
            return reducer, signature, None
        return reducer, signature, _other_variables(reducer.signature, signature)

    def _make(self, variables: list[Any], grads: Sequence[Any]) -> Reducer:
        return Reducer(self.options, self.op, self.process_set, variables, grads)

    def _add(self, key: tuple[int, ...], reducer: S, variables: list[Any]) -> S:
        self.reducers[key] = reducer
        for variable in variables:
            weakref.finalize(tensor_of(variable), _forget, weakref.ref(self), key).atexit = False
        for expected in _EXPECTED:
            expected.hand_to(self, reducer, key)
        return reducer

    def present_reducers(self) -> dict[tuple[int, ...], Served]:
        """The same as `reducers`, in a copy: the garbage collector may take some away at any moment."""
        return self.reducers.copy()

    def synchronize_replicas(self) -> None:
        """Nothing is under way between steps, but with `Partial`."""

    def set_density(self, density: float | None) -> None:
        """See FlatReducer.set_density; for the reducers that there are, and those to come."""
        self.options = self.options.with_density(density)
        for reducer in self.present_reducers().values():
            reducer.flat.set_density(density)


@dataclass(frozen=True)
class TapeReductions:
    """What a tape asks for: the GradientReducer of all tapes of its kind, and its own density."""

    gradient_reducer: GradientReducer
    density: float | None

    def __call__(self, grads: Sequence[Any], vars: Sequence[Any] | None = None,
                 use_generic_names: bool = False) -> list[Any]:
        """See GradientReducer."""
        reduced: list[Any] = self.gradient_reducer(grads, vars, use_generic_names, self.density)
        return reduced


def gradient_reducer_for(name: str, options: Scheme, op: Any, process_set: Any, sparse_as_dense: bool,
                         sparse: Any) -> GradientReducer | TapeReductions:
    """New ones for an optimizer; for a tape, those of all tapes of which the same was asked, but for the density.

    name: Horovod's.
    """
    if "Tape" not in name:
        return GradientReducer(options, op, process_set, sparse_as_dense, sparse)
    density = options.density
    key = (type(options), tuple(options.kind().items()), op, process_set.process_set_id, sparse_as_dense)
    if key not in _OF_TAPES:
        _OF_TAPES[key] = GradientReducer(options, op, process_set, sparse_as_dense, sparse)
    return TapeReductions(_OF_TAPES[key], density)


def gradient_reducer_of(target: Any) -> GradientReducer | None:
    """Of an optimizer, or of a model's; None where there are none."""
    found = getattr(target, "_allreduce_grads", None)
    if isinstance(found, GradientReducer):
        return found
    inner = (getattr(target, name, None) for name in ("optimizer", "inner_optimizer"))
    return next((found for each in inner if each is not None and (found := gradient_reducer_of(each))), None)


def gradient_reducers_of(target: Any) -> list[GradientReducer]:
    """Of an optimizer; or of all optimizers that a model has."""
    holders = optimizers_of(target) if isinstance(target, tf.keras.Model) else [target]
    found = [gradient_reducer_of(holder) for holder in holders]
    return [gradient_reducer for gradient_reducer in found if gradient_reducer is not None]


def reducers_by_optimizer(target: Any) -> list[list[Served]]:
    """Of an optimizer or a model; or those that tapes have of a model's variables, or of a list of variables."""
    several = gradient_reducers_of(target)
    if several:
        return [list(gradient_reducer.present_reducers().values()) for gradient_reducer in several]
    wanted = {id(variable) for variable in variables_of(target)}
    return [[reducer for each in _OF_TAPES.values() for key, reducer in each.present_reducers().items()
             if wanted & set(key)]]


def reducers_of(target: Any) -> list[Served]:
    """Those of all optimizers, together."""
    return [reducer for reducers in reducers_by_optimizer(target) for reducer in reducers]


def variables_of(target: Any) -> list[Any]:
    """The tf.Variables of a model, or of a list of variables."""
    if not isinstance(target, list | tuple):
        target = getattr(target, "trainable_variables", ())
    return [tensor_of(variable) for variable in target if is_variable(variable)]


def is_variable(target: Any) -> bool:
    """Whether it is a tf.Variable, or a Keras variable that has one."""
    return isinstance(tensor_of(target), tf.Variable)


def targets_of(function: str, *targets: Any) -> list[Any]:
    """The targets, where models and optimizers in a list stand alone; the variables in a list stay a list.

    function: what was called with them.
    Raises PluginError for what has no variables.
    """
    found: list[Any] = []
    for target in targets:
        if isinstance(target, list | tuple):
            variables = [each for each in target if is_variable(each)]
            found += [variables] if variables else []
            found += targets_of(function, *(each for each in target if not is_variable(each)))
        elif is_variable(target):
            found.append([target])
        elif hasattr(type(target), "variables") or gradient_reducer_of(target) is not None:
            found.append(target)
        else:
            raise PluginError(f"{function} takes models, layers, optimizers, or lists of variables or of these; got "
                              f"{type(target).__name__}: write {function}(model)")
    return found


def expect_state(target: Any, path: Any) -> None:
    """The target's reducers load their state from a file when they next step: those there are, and those to come."""
    several, variables = gradient_reducers_of(target), variables_of(target)
    if not several and not variables:
        raise PluginError(f"{target!r} has neither a reduction made with compression=OkTopk(...) nor variables")
    owners: list[GradientReducer | None] = [*several] or [None]
    for number, gradient_reducer in enumerate(owners):
        expected = _Expected(path, number, None if gradient_reducer is None else weakref.ref(gradient_reducer),
                             [weakref.ref(v) for v in variables])
        for each in (*_OF_TAPES.values(), *several):
            for key, reducer in each.reducers.items():
                expected.hand_to(each, reducer, key)
        _EXPECTED.append(expected)


@dataclass
class _Expected:
    """A file, and whom its state is for: an optimizer's GradientReducer, or those of tapes over some variables.

    number: of the optimizer among those of the target. taken: what of the file is taken, on rank 0.
    """

    path: Any
    number: int
    gradient_reducer: weakref.ref[GradientReducer] | None
    variables: list[weakref.ref[Any]]
    handed: int = 0
    taken: set[int] = field(default_factory=set)

    def hand_to(self, gradient_reducer: GradientReducer, reducer: Served, key: tuple[int, ...]) -> None:
        if self.gradient_reducer is not None:
            wanted = self.gradient_reducer() is gradient_reducer
        else:
            known = {id(ref()) for ref in self.variables}
            wanted = gradient_reducer in _OF_TAPES.values() and bool(key) and known.issuperset(key)
        if wanted:
            reducer.before_step = partial(checkpoint.load, index=self.handed, path=self.path, optimizer=self.number,
                                          taken=self.taken)
            self.handed += 1


def is_expected(gradient_reducer: GradientReducer) -> bool:
    """Whether a state waits for the first reducer of an optimizer."""
    return any(not each.handed and each.gradient_reducer is not None and each.gradient_reducer() is gradient_reducer
               for each in _EXPECTED)


def in_use() -> bool:
    """Whether any reduction of ours is in use."""
    return any(gradient_reducer.reducers for gradient_reducer in list(_ALL))


def tensor_of(variable: Any) -> Any:
    """The tf.Variable of a Keras 3 variable; anything else as it is."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def refuse_overwritten(variables: Iterable[Any]) -> None:
    """Raise PluginError for a variable whose "gradient" is its next value: the scales of Keras' float8 layers."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False) is True:
            raise PluginError("float8 training is not supported, as it writes new scales over the variables at every "
                              f"step: use mixed_bfloat16 or mixed_float16; got {name_of(variable)}")


def _forget(gradient_reducer: weakref.ref[GradientReducer], key: tuple[int, ...]) -> None:
    """One of the variables is gone. What calls this lives as long as they do, so it must hold nothing that may."""
    present = gradient_reducer()
    if present is not None:
        present.reducers.pop(key, None)


def _check_variables(variables: Sequence[Any], grads: Sequence[Any]) -> None:
    if len(variables) != len(grads):
        raise PluginError(f"OkTopk needs the variable of every gradient, to keep what is not sent: got {len(grads)} "
                          f"gradients and {len(variables)} variables")
    for variable in variables:
        if not isinstance(variable, tf.Variable):
            raise PluginError("OkTopk reduces gradients of tf.Variables, which last over the steps; got that of "
                              f"{variable!r}")


def _other_variables(before: Sequence[str], now: Sequence[str]) -> str:
    changed = [f"gone or changed: '{line}'" for line in before if line not in now]
    changed += [f"new or changed: '{line}'" for line in now if line not in before]
    return ("the gradients differ from those of the first step, so their residual has no place: "
            f"{'; '.join(changed[:4]) or 'another order'}. Each gradient must be there, None or sparse alike at all "
            "steps. If steps train different variables, reduce those of every step in one call of gradient() (of a "
            "persistent tape) or apply(), and the others in another")
