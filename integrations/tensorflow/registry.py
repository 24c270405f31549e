"""The runs that serve an optimizer, a model, or the variables that tapes differentiate by.

An optimizer has Runs of its own. Tapes are made anew at every step, so theirs are found by what was asked for, and by
the variables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.make import kind_of, with_scheme
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.state import gather
from horovod_oktopk.tensorflow.run import NO_RATE, Local, Refusal, Run, check_place
from horovod_oktopk.tensorflow.tensors import is_dense, ranks_of, signature_of
from horovod_oktopk.tensorflow.variables import check_variables, key_of, optimizers_of, tensor_of, trained_by

_ALL: weakref.WeakSet[Runs] = weakref.WeakSet()
OF_TAPES: dict[Any, Runs] = {}
STATES: list[WaitingState] = []
"""States asked for the variables of tapes."""

JOINED = ("StepAhead has no place for variables that join others after the first step: make a new optimizer, as for "
          "compile(), or build it with all variables at first")


class Runs:
    """The runs of one optimizer, or of all tapes of a kind: one for each list of variables.

    `normalizes` is True if the optimizer normalizes its gradients. `rate` returns its learning rate.
    """

    def __init__(self, options: Any, op: Any, process_set: Any, sparse_as_dense: bool,
                 normalizes: bool = False, rate: Callable[[], Any] = NO_RATE) -> None:
        self.kind = kind_of(options)
        self.scheme: Scheme = getattr(options, "scheme", options)
        """With the present density."""
        self.adopts = False
        """See Mode.adopts; for the runs to come."""
        self._options, self._op, self._process_set = options, op, process_set
        self._sparse_as_dense, self._normalizes, self._rate = sparse_as_dense, normalizes, rate
        self._by_key: dict[tuple[int, ...], Run] = {}
        """By the identities of the variables, with which the runs go."""
        self._host_set: Any = False  # not asked for yet
        self.states: list[WaitingState] = []
        """All that were asked for. The runs of all tapes have one list of them."""
        self._serving: dict[Run, tuple[Any, Local]] = {}
        _ALL.add(self)

    @property
    def takes_part(self) -> bool:
        """True if this rank is in the process set; if not, its gradients stay as they are, as in stock."""
        return bool(self._process_set.included())

    def present(self) -> dict[tuple[int, ...], Run]:
        """Return a copy of the runs: the garbage collector may take some away at any moment."""
        return self._by_key.copy()

    def set_density(self, density: float | None) -> None:
        """See Mode.set_density; for the runs that there are, and those to come."""
        self.scheme = self.scheme.with_density(density)
        for run in self.present().values():
            run.mode.set_density(density)

    # Steps.

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], density: float | None = None) -> list[Any]:
        """Return the gradients, reduced, if the mode does so before an optimizer's step; None where there is none.

        Where each host is one worker of a mode that acts at the step, they are averaged over its ranks.
        """
        if not self.takes_part:
            return list(gradients)
        check_place()
        check_variables(list(variables), list(gradients))
        if self.kind.acts_at_step:
            return self._averaged_on_host(gradients) if self.scheme.hierarchical else list(gradients)
        gradients = self._dense_if_asked(gradients)
        run, refusal = self.run_of(variables, gradients)
        slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        with tf.name_scope("OkTopkAllreduce"):
            return self._reduced(gradients, lambda dense: run.reduce(dense, slices, density, refusal),
                                 self._process_set)

    def _reduced(self, gradients: Sequence[Any], reduce: Callable[[list[Any]], list[Any]],
                 process_set: Any) -> list[Any]:
        dense = reduce([g for g in gradients if is_dense(g)])
        with tf.control_dependencies(dense):  # the roll call comes first: then no rank waits in vain
            sparse = {index: hvd.allreduce(g, op=self._op, process_set=process_set)
                      for index, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        remaining = iter(dense)
        return [next(remaining) if is_dense(g) else sparse.get(index) for index, g in enumerate(gradients)]

    def _averaged_on_host(self, gradients: Sequence[Any]) -> list[Any]:
        if self._host_set is False:
            self._host_set = ranks_of(self._process_set).host_set(self.scheme.transport, self.scheme.hierarchical)
        if self._host_set is None:
            return list(gradients)
        return self._reduced(gradients, lambda dense: hvd.grouped_allreduce(
            dense, op=self._op, process_set=self._host_set) if dense else [], self._host_set)

    def step_in_rounds(self, gradients: Sequence[Any], variables: Sequence[Any], local: Local, rate: Any) -> None:
        """Hand in gradients, and take the steps of the rounds since; see `Run.step_in_rounds`."""
        gradients = self._dense_if_asked(gradients)
        if any(isinstance(g, tf.IndexedSlices) for g in gradients):
            self.kind.check("sparse")
        run, refusal = self.run_of(variables, gradients)
        if refusal:
            run.mode.refuse_step(*refusal)
        self._serving[run] = rate, local
        run.step_in_rounds(gradients, rate, local)

    def synchronize_replicas(self) -> None:
        """Serve rounds until all ranks are here. Collective. Do nothing with other modes."""
        for run, (rate, local) in list(self._serving.items()):
            run.synchronize(rate, local)

    def _dense_if_asked(self, gradients: Sequence[Any]) -> list[Any]:
        return [tf.convert_to_tensor(g) if self._sparse_as_dense and isinstance(g, tf.IndexedSlices) else g
                for g in gradients]

    # Runs.

    def run_of(self, variables: Sequence[Any], gradients: Sequence[Any]) -> tuple[Run, Refusal | None]:
        """Return the Run of these variables, and the reason to refuse the gradients, if there is one.

        A new Run is made for new variables; if they overlap with those of another, that one refuses them.
        """
        key, signature = key_of(variables), signature_of(variables, gradients)
        run = self._by_key.get(key) or next((other for known, other in self.present().items()
                                             if not set(known).isdisjoint(key)), None)
        if run is None:
            return self._add(key, variables, gradients), None
        if run.signature == signature and key in self._by_key:
            return run, None
        return run, (_other_gradients(run.signature, signature), signature)

    def run_over(self, variables: Sequence[Any]) -> Run:
        """Return the run of these parameters: a new one at first; for some of them, the one of more.

        Raise PluginError if some have joined others.
        """
        key = key_of(variables)
        for known, run in self.present().items():
            if set(key) <= set(known):
                return run
            if set(key) & set(known):
                raise PluginError(JOINED)
        return self._add(key, variables, [None] * len(variables))

    def run_before_a_step(self, variables: Sequence[Any]) -> Run:
        """Return a run of a rank that has taken no step yet, to meet the other ranks with, which may take one."""
        if self.kind.reads_memory:
            return self.run_over(variables)
        return Run(with_scheme(self._options, self.scheme), self._op, self._process_set, variables, variables,
                   self._normalizes)

    def _add(self, key: tuple[int, ...], variables: Sequence[Any], gradients: Sequence[Any]) -> Run:
        options = with_scheme(self._options, self.scheme)
        run = Run(options, self._op, self._process_set, variables, gradients, self._normalizes, self._rate)
        run.mode.adopts = self.adopts
        for before in runs_over(variables):  # of an optimizer that has had these: the model holds w then
            before.mode.suspend()
        self._by_key[key] = run
        for variable in variables:
            weakref.finalize(tensor_of(variable), _forget, weakref.ref(self), key).atexit = False
        for state in self.states:
            state.hand_to(run, key)
        return run


def _forget(runs: weakref.ref[Runs], key: tuple[int, ...]) -> None:
    """Drop a run whose variable is gone. What calls this lives as long as they do, and must hold nothing that may."""
    present = runs()
    if present is not None:
        present._by_key.pop(key, None)


def _other_gradients(before: Sequence[str], now: Sequence[str]) -> str:
    changed = [f"gone or changed: '{line}'" for line in before if line not in now]
    changed += [f"new or changed: '{line}'" for line in now if line not in before]
    return ("the gradients differ from those of the first step, so their residual has no place: "
            f"{'; '.join(changed[:4]) or 'another order'}. Each gradient must be there, None or sparse alike at all "
            "steps. If steps train different variables, reduce those of every step in one call of gradient() (of a "
            "persistent tape) or apply(), and the others in another")


# Which runs.

def runs_of_tapes(options: Scheme, op: Any, process_set: Any, sparse_as_dense: bool) -> Runs:
    """Return the runs of all tapes of which the same was asked, but for the density."""
    key = (type(options), tuple(options.kind().items()), op, process_set.process_set_id, sparse_as_dense)
    if key not in OF_TAPES:
        OF_TAPES[key] = Runs(options, op, process_set, sparse_as_dense)
        OF_TAPES[key].states = STATES
    return OF_TAPES[key]


def runs_of(target: Any) -> Runs | None:
    """Return the Runs of an optimizer, or of a model's optimizer; None if it has none."""
    found = getattr(vars(target).get("oktopk") if hasattr(target, "__dict__") else None, "runs", None)
    if isinstance(found, Runs):
        return found
    inner = (getattr(target, name, None) for name in ("optimizer", "inner_optimizer"))
    return next((found for each in inner if each is not None and (found := runs_of(each))), None)


def all_runs_of(target: Any) -> list[Runs]:
    """Return those of an optimizer; or of all optimizers that a model has."""
    holders = optimizers_of(target) if isinstance(target, tf.keras.Model) else [target]
    return [found for holder in holders if (found := runs_of(holder)) is not None]


def runs_by_optimizer(target: Any) -> list[list[Run]]:
    """Return the runs of an optimizer or a model; or those of tapes over a model's variables, or a list of them."""
    several = all_runs_of(target)
    if several:
        return [list(each.present().values()) for each in several]
    wanted = set(key_of(trained_by(target)))
    return [[run for each in OF_TAPES.values() for key, run in each.present().items() if wanted & set(key)]]


def each_run_of(target: Any) -> list[Run]:
    """Return the runs of all optimizers of a target, together."""
    return [run for runs in runs_by_optimizer(target) for run in runs]


def runs_over(variables: Sequence[Any]) -> list[Run]:
    """Return the runs that hold parameters, and train one of these variables, whatever optimizer has them."""
    wanted = set(key_of(variables))
    return [run for each in list(_ALL) if each.kind.reads_memory for key, run in each.present().items()
            if not wanted.isdisjoint(key)]


def in_use() -> bool:
    """Return True if any reduction of ours is in use."""
    return any(each.present() for each in list(_ALL))


@dataclass
class WaitingState:
    """A file for the runs of an optimizer, or those of tapes over some variables.

    `number` is the optimizer's among those of the target. `taken` is what of the file is taken, on rank 0.
    """

    path: Any
    number: int
    variables: list[weakref.ref[Any]] | None
    handed: int = 0
    taken: set[int] = field(default_factory=set)

    def hand_to(self, run: Run, key: tuple[int, ...]) -> None:
        if self.variables is None or (key and {id(ref()) for ref in self.variables}.issuperset(key)):
            run.load_state_now = partial(gather.load, index=self.handed, path=self.path, optimizer=self.number,
                                     taken=self.taken)
            self.handed += 1
