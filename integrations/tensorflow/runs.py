"""The runs of one optimizer, or of all tapes of a kind: what they do at a step, by mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.gradient_mode import GradientMode
from horovod_oktopk.modes.make import Kind, kind_of, with_scheme
from horovod_oktopk.modes.partial.mode import PartialMode
from horovod_oktopk.modes.step_ahead.mode import StepAheadMode
from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.state import gather
from horovod_oktopk.tensorflow.operations import check_place
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.run import ALL, GradientRun, PartialRun, RateOf, Refusal, Run, StepAheadRun, runs_over
from horovod_oktopk.tensorflow.tensors import allreduce, in_float32, is_dense, ranks_of, signature_of
from horovod_oktopk.tensorflow.variables import ByVariables, check_variables, key_of, name_of, tensor_of

JOINED = ("StepAhead has no place for variables that join others after the first step: make a new optimizer, as for "
          "compile()" + ", or build it with all variables at first" * KERAS_3)

One = TypeVar("One", bound=Run)
LocalOf = Callable[..., object]
"""A Local that may also be given the StepAheadRun whose step it takes, and which scales the learning rate."""


class Runs(Generic[One]):
    """The runs of one optimizer, or of all tapes of a kind: one for each list of variables.

    `normalizes` is True if the optimizer normalizes its gradients.
    """

    of_one: type[One]
    """The class of the runs."""

    def __init__(self, options: Any, op: Any, process_set: Any, sparse_as_dense: bool,
                 normalizes: bool = False, rate: RateOf = lambda: None) -> None:
        self.kind = kind_of(options)
        self.scheme: Scheme = getattr(options, "scheme", options)
        """With the present density."""
        self.adopts = False
        """See Mode.adopts; for the runs to come."""
        self._options, self._op, self.process_set = options, op, process_set
        self._sparse_as_dense, self._normalizes, self._rate = sparse_as_dense, normalizes, rate
        self.by_key: ByVariables[One] = ByVariables()
        self.states: list[WaitingState] = []
        """All that were asked for. The runs of all tapes have one list of them."""
        self.blocks: set[object] = set()
        """One thing for each block of `shared_parameters` that the program is inside of."""
        ALL.add(self)

    @property
    def takes_part(self) -> bool:
        """True if this rank is in the process set; if not, its gradients stay as they are, as in stock."""
        return bool(self.process_set.included())

    def present(self) -> dict[tuple[int, ...], One]:
        """Return a copy of the runs: the garbage collector may take some away at any moment."""
        return self.by_key.copy()

    def set_density(self, density: float | None) -> None:
        """See Mode.set_density; for the runs that there are, and those to come."""
        self.scheme = self.scheme.with_density(density)
        for run in self.present().values():
            run.mode.set_density(density)

    @cached_property
    def _host_set(self) -> Any:
        """The process set of this rank's host, if each host is one worker; else None. It is made collectively."""
        if not self.scheme.hierarchical:
            return None
        return ranks_of(self.process_set).host_set(self.scheme.transport, self.scheme.hierarchical)

    # Steps.

    def reduce_before_step(self, gradients: Sequence[Any], variables: Sequence[Any],
                           density: float | None = None) -> list[Any]:
        """Return the gradients, reduced, if the mode does so before an optimizer's step; None where there is none."""
        if not self.takes_part:
            return list(gradients)
        check_place()
        check_variables(variables)
        return self.reduced(gradients, variables, density)

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], density: float | None) -> list[Any]:  # noqa: ARG002
        """Return the gradients, averaged over the ranks of a host where each host is one worker."""
        if self._host_set is None:
            return list(gradients)
        return self.reduced_by(in_float32(lambda dense: hvd.grouped_allreduce(
            dense, op=self._op, process_set=self._host_set) if dense else []), gradients, self._host_set)

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], local: LocalOf, *,  # noqa: ARG002
             all_variables: Sequence[Any], checks_overflow: bool) -> None:  # noqa: ARG002
        """Call `local` as often as the mode says: once by default. The other arguments are those of Steps.apply."""
        local(list(gradients))

    def reduced_by(self, reduce: Callable[[list[Any]], list[Any]], gradients: Sequence[Any],
                   process_set: Any) -> list[Any]:
        """Return the gradients: `reduce` reduces dense ones, and Horovod sparse ones, over this process set."""
        dense = reduce([g for g in gradients if is_dense(g)])
        with tf.control_dependencies(dense):  # the roll call comes first: then no rank waits in vain
            sparse = {index: allreduce(g, op=self._op, process_set=process_set)
                      for index, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        remaining = iter(dense)
        return [next(remaining) if is_dense(g) else sparse.get(index) for index, g in enumerate(gradients)]

    @contextmanager
    def block(self) -> Iterator[bool]:
        """Count a block of `shared_parameters`; yield True if the program is in no other."""
        block = object()
        self.blocks.add(block)
        try:
            yield len(self.blocks) == 1
        finally:
            self.blocks.discard(block)

    def synchronize_replicas(self) -> None:
        """Make replicas equal, where they may differ. Collective."""

    def dense_if_asked(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients, the sparse ones as dense ones if the user has asked for that."""
        return [tf.convert_to_tensor(g) if self._sparse_as_dense and isinstance(g, tf.IndexedSlices) else g
                for g in gradients]

    # Runs.

    def run_of(self, variables: Sequence[Any], gradients: Sequence[Any]) -> tuple[One, Refusal | None]:
        """Return the Run of these variables, and the reason to refuse the gradients, if there is one.

        A new Run is made for new variables; if they overlap with those of another, that one refuses them.
        """
        key, signature = key_of(variables), signature_of(variables, gradients)
        run = self.by_key.get(key) or next((other for known, other in self.present().items()
                                            if not set(known).isdisjoint(key)), None)
        if run is None:
            return self.add(key, variables, gradients), None
        if run.signature == signature and key in self.by_key:
            return run, None
        return run, (_other_gradients(run.signature, signature), signature)

    def run_over(self, variables: Sequence[Any]) -> One:
        """Return a run of a rank that has taken no step yet, to meet the other ranks with, which may take one."""
        return self._make(variables, gradients=variables)

    def _make(self, variables: Sequence[Any], gradients: Sequence[Any]) -> One:
        return self.of_one(with_scheme(self._options, self.scheme), self._op, self.process_set, variables, gradients,
                           self._normalizes, self._rate)

    def add(self, key: tuple[int, ...], variables: Sequence[Any], gradients: Sequence[Any]) -> One:
        """Return a new run of these variables, with the gradients of its first step."""
        run = self._make(variables, gradients)
        run.mode.adopts = self.adopts
        run.is_open = partial(_is_open, weakref.ref(self))
        for before in runs_over(key):  # of an optimizer that has had these
            before.give_way()
        self.by_key.keep(variables, run)
        are_of_tapes = self.states is STATES
        # Those of StepAhead live as long as a variable with this rank's own values: longer than the optimizer, maybe.
        kept = (lambda: self) if self.kind.reads_memory else weakref.ref(self)
        for tensor in map(tensor_of, variables):
            tensor._oktopk_runs = None if are_of_tapes else kept
        beside = () if are_of_tapes else [each for each in STATES if each.served.isdisjoint(key)]
        for state in (*self.states, *beside):
            state.hand_to(run, key)
        return run


class GradientRuns(Runs[GradientRun]):
    """Gradients are reduced by a tape, or before the optimizer's plain step."""

    of_one = GradientRun

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], density: float | None) -> list[Any]:
        gradients = self.dense_if_asked(gradients)
        run, refusal = self.run_of(variables, gradients)
        slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        with tf.name_scope("OkTopkAllreduce"):
            return self.reduced_by(lambda dense: run.reduce(dense, slices, density, refusal), gradients,
                                   self.process_set)


class StepAheadRuns(Runs[StepAheadRun]):
    """The optimizer's own steps, whose moves are exchanged."""

    of_one = StepAheadRun

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], local: LocalOf, *,
             all_variables: Sequence[Any], checks_overflow: bool) -> None:
        constrained = [name_of(each) for each in variables if getattr(each, "constraint", None) is not None]
        if constrained:
            self.kind.check("constraint", name=constrained[0])
        run = self.run_over(all_variables)
        run.step(variables, gradients, lambda given: local(given, run), checks_overflow)

    def run_over(self, variables: Sequence[Any]) -> StepAheadRun:
        """Return the run of these parameters: a new one at first; for some of them, the one of more.

        Raise PluginError if some have joined others.
        """
        key = key_of(variables)
        for known, run in self.present().items():
            if set(key) <= set(known):
                return run
            if set(key) & set(known):
                raise PluginError(JOINED)
        return self.add(key, variables, [None] * len(variables))


class PartialRuns(Runs[PartialRun]):
    """The optimizer's steps in rounds."""

    of_one = PartialRun

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], local: LocalOf, **_: Any) -> None:
        gradients = self.dense_if_asked(gradients)
        if any(isinstance(g, tf.IndexedSlices) for g in gradients):
            self.kind.check("sparse")
        run, refusal = self.run_of(variables, gradients)
        if refusal:
            run.mode.refuse_step(*refusal)
        run.step(gradients, local)

    def synchronize_replicas(self) -> None:
        for run in self.present().values():
            run.synchronize()


RUNS: dict[Kind, type[Runs[Any]]] = {
    GradientMode: GradientRuns, StepAheadMode: StepAheadRuns, PartialMode: PartialRuns}
"""By the class of the mode."""


STATES: list[WaitingState] = []
"""States asked for variables of which no optimizer is known: for those of tapes, and of optimizers to come."""


def _is_open(kept: weakref.ref[Runs[Any]]) -> bool:
    runs = kept()
    return runs is not None and len(runs.blocks) > 0


def _other_gradients(before: Sequence[str], now: Sequence[str]) -> str:
    changed = [f"gone or changed: '{line}'" for line in before if line not in now]
    changed += [f"new or changed: '{line}'" for line in now if line not in before]
    return ("the gradients differ from those of the first step, so their residual has no place: "
            f"{'; '.join(changed[:4]) or 'another order'}. Each gradient must be there, None or sparse alike at all "
            "steps. If layers were frozen or thawed, distribute a new optimizer. If steps train different variables, "
            "reduce those of every step in one call of gradient() (of a persistent tape) or apply(), and the others "
            "in another")


@dataclass(eq=False)
class WaitingState:
    """A file for the runs of an optimizer, or those of tapes over some variables.

    `number` is the optimizer's among those of the target. `taken` is what of the file is taken, on rank 0.
    """

    path: Any
    number: int
    variables: list[weakref.ref[Any]] | None
    handed: int = 0
    served: set[int] = field(default_factory=set)
    """Identities of the variables whose runs had it."""
    taken: set[int] = field(default_factory=set)

    def hand_to(self, run: Run, key: tuple[int, ...]) -> None:
        if self.variables is None or (key and {id(ref()) for ref in self.variables}.issuperset(key)):
            run.load_state_now = partial(gather.load, index=self.handed, path=self.path, optimizer=self.number,
                                     taken=self.taken)
            run.gave_way = False
            self.handed += 1
            self.served.update(key)
