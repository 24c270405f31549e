"""Actions on a model, an optimizer or variables between steps, and meetings of all ranks for them.

And the residual and the counters, in files and in Horovod's elastic states: they never lie in variables, which
Horovod overwrites with rank 0's.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

from horovod_oktopk.errors import AgreementError, PluginError
from horovod_oktopk.modes.api import find_owners, shared_parameters
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.state import gather
from horovod_oktopk.tensorflow import registry
from horovod_oktopk.tensorflow.private import built_with
from horovod_oktopk.tensorflow.registry import (
    OF_TAPES,
    all_runs_of,
    each_run_of,
    runs_beside,
    runs_by_optimizer,
    tapes_beside,
)
from horovod_oktopk.tensorflow.run import Run, runs_over
from horovod_oktopk.tensorflow.runs import STATES, Runs, WaitingState
from horovod_oktopk.tensorflow.variables import is_variable, key_of, tensor_of, trained_by, variables_in
from horovod_oktopk.transport.elastic import ElasticState

PathLike = str | os.PathLike[str]
NONE_YET = ("there is no density to set: no optimizer of these variables was made with compression=OkTopk(...), and "
            "no tape has reduced their gradients yet. Give model.compile what DistributedOptimizer has returned; "
            "with tapes, call set_density after the first step")
TAPES = ("{function} of what has a distributed optimizer is about that alone, and leaves out tapes beside "
         "it: call {function}([variables ...], ...) for these, too; a file of theirs has a path of its own")
IN_GRAPH = ("{function} changes the values of variables when it is called, so it cannot be part of a tf.function: "
            "call it outside of that")


class Target:
    """An Owner: a model, a layer, an optimizer, or a list of variables."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def reports(self) -> list[StepReport]:
        return [run.mode.report for run in each_run_of(self._target) if run.mode.report is not None]

    def set_density(self, density: float | None) -> None:
        """See Owner; of no effect on dense training. Raise PluginError for variables of tapes without a step."""
        several: list[Any] = [*all_runs_of(self._target)] or [run.mode for run in each_run_of(self._target)]
        if not several and not registry.trains_densely(self._target):
            raise PluginError(NONE_YET)
        _tell_of_tapes(self._target, "set_density")
        for each in several:
            each.set_density(density)

    def catch_up(self) -> None:
        """See Owner. Raise PluginError inside a tf.function."""
        if not tf.executing_eagerly():
            raise PluginError(IN_GRAPH.format(function="catch_up"))
        for run in _runs_of(self._target):
            run.mode.catch_up()

    def synchronize_replicas(self) -> None:
        for runs in all_runs_of(self._target):
            runs.synchronize_replicas()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See Owner. If a state is loaded inside, all ranks take it together at the end of the outermost block."""
        if not tf.executing_eagerly():
            raise PluginError(IN_GRAPH.format(function="shared_parameters"))
        before = _count_states(self._target)
        with ExitStack() as stack:
            for run in _runs_of(self._target):
                stack.enter_context(run.mode.shared())
            are_outermost = [stack.enter_context(each.block()) for each in _owners_of(self._target)]
            then = suspend  # so that the model holds w when the state is taken at last
            try:
                yield
                if all(are_outermost):
                    then = resume
            finally:
                if _count_states(self._target) != before:
                    then(self._target)


def owners_of(target: Any) -> list[Target] | None:
    """Return what a target has of ours, if it has anything to train; None for what is no target; see `find_by`."""
    if isinstance(target, list | tuple):
        return [Target(list(target))] if target and all(map(is_variable, target)) else None
    if is_variable(target):
        return [Target([target])]
    if not hasattr(type(target), "variables") and not all_runs_of(target):
        return None
    known = (all_runs_of(target) or variables_in(target, "trainable_variables") or registry.trains_densely(target)
             or runs_over(key_of(variables_in(target))))
    return [Target(target)] if known else []


def suspend(target: Any) -> None:
    """Put what all ranks share into the target, until `resume` or the next step; keep what is not sent yet."""
    for run in _runs_of(target):
        run.mode.suspend()


def leave_blocks(target: Any) -> None:
    """Forget blocks of `shared_parameters` that an error has left open, as something holds its traceback."""
    for each in _owners_of(target):
        each.blocks.clear()


def resume(target: Any) -> None:
    """Take a state that waits, on all ranks together, and continue with what was suspended.

    It is for the time before a step's gradients are computed.
    A run that is still to come takes its state with the first step, unless it is of the target's one optimizer.
    """
    several = [each for each in _owners_of(target) if each.kind.reads_memory and each.takes_part]
    if len(several) == 1 and any(not state.handed for state in several[0].states) and getattr(target, "built", False):
        variables = getattr(target, "trainable_variables", None) or built_with(target)
        if variables:
            several[0].run_over(variables)
    runs = [run for each in several for run in each.present().values()]  # not others that had these variables before
    for run in runs:
        run.load()
    for run in runs:
        run.resume()


def _owners_of(target: Any) -> list[Runs[Any]]:
    """Return the Runs of a target's optimizers; or, if it has none, of those that train its variables."""
    return all_runs_of(target) or runs_beside(target)


def _count_states(target: Any) -> list[int]:
    """Return how many states were asked for by now, for each owner of the target and for others."""
    return [*(len(each.states) for each in _owners_of(target)), len(STATES)]


def _tell_of_tapes(target: Any, function: str) -> None:
    if tapes_beside(target):
        warnings.warn(TAPES.format(function=function), stacklevel=2)


def _runs_of(target: Any) -> list[Run]:
    own = (run for run in each_run_of(target) if run.mode.reads_memory)
    return list(dict.fromkeys([*own, *runs_over(key_of(variables_in(target)))]))


def meet(target: Any, doing: str) -> None:
    """Tell the other ranks that this one takes no step now, and what it does ("average metrics"). Collective.

    Raise AgreementError, on all ranks, if some take a step or do something else. With `Partial` ranks may take
    different numbers of steps, and meet in `synchronize_replicas`.
    """
    runs = each_run_of(target) or [each.run_over(trained_by(target)) for each in all_runs_of(target)]
    modes = [run.mode for run in runs]
    for mode in sorted(modes, key=lambda each: each.reduction.ranks.channel):  # as they first stepped
        if mode.reduction.ranks.takes_part:
            mode.announce(doing)


def check_alike(what: str, names: Iterable[str]) -> None:
    """Raise AgreementError, on all ranks, if these are not the same. Collective."""
    theirs = hvd.allgather_object(list(names), name="horovod_oktopk.alike")
    if any(each != theirs[0] for each in theirs):
        found = "; ".join(f"rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(theirs))
        raise AgreementError(f"the ranks have different {what} ({found}): compile and fit the model alike on all "
                             "ranks")


def broadcast_by_position(variables: Sequence[Any], root_rank: int) -> None:
    """Broadcast as hvd.broadcast_variables, which would wait for ever if ranks have other names for a variable.

    Horovod has no bfloat16: its bits are sent.
    """
    def broadcast() -> None:
        for index, variable in enumerate(variables):
            as_bits = variable.dtype == tf.bfloat16
            found = hvd.broadcast(tf.bitcast(variable, tf.uint16) if as_bits else variable, root_rank,
                                  name=f"horovod_oktopk.variable.{index}", ignore_name_scope=True)
            variable.assign(tf.bitcast(found, tf.bfloat16) if as_bits else found)

    # Calls of new functions with the same code would make TensorFlow warn that this one is traced too often.
    tf.function(broadcast, autograph=False).get_concrete_function()()


# Files and elastic states.

def save_state(target: Any, path: PathLike, **marks: Any) -> None:
    """Write the residuals and counters of all ranks to one file.

    It is called on all ranks together; rank 0 writes.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.
        path: the file, on rank 0's disk.
        **marks: plain values to be stored beside it, which `read_marks` (of `horovod_oktopk.tensorflow.state`) gives
            back.

    Raises:
        PluginError: Nothing has been reduced yet.
        OSError: On all ranks: rank 0 cannot write the file, as the disk is full, say. Training may go on.
        OptionError: On all ranks: marks are not plain values.

    Examples:
        >>> save_state(model, "residuals.npz")
    """
    found, path = find_owners("save_state", target), os.fspath(path)
    owners = _owners_of(target)
    if owners and not any(each.takes_part for each in owners):
        return
    for each in found:
        each.synchronize_replicas()
    several = runs_by_optimizer(target)
    _tell_of_tapes(target, "save_state")
    if not any(several):
        raise PluginError(f"there is no state to save: no gradient of {target!r} has been reduced with OkTopk yet: "
                          "save it after the first step")
    numbers = [number for number, runs in enumerate(several) for _ in runs]
    gather.save([run.mode for runs in several for run in runs], path, numbers, **marks)


def load_state(target: Any, path: PathLike) -> None:
    """Take what `save_state` wrote, when the next step is taken.

    It is called on all ranks together; rank 0 reads the file. At the same number of ranks each gets its own residual
    back, and the run goes on with the same bits; at another what was not sent keeps its effect. A residual of another
    dtype is converted: from float64 to float32 it is rounded. The next step raises OptionError on all ranks, and
    takes nothing, if the file does not fit, or is damaged.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.
        path: the file, on rank 0's disk.

    Examples:
        >>> load_state(model, "residuals.npz")
    """
    several, variables = all_runs_of(target), trained_by(target)
    if not several and not variables:
        raise PluginError(f"{target!r} has neither a reduction made with compression=OkTopk(...) nor variables: "
                          "give a model, its optimizer or its variables")
    for number, owners in enumerate([[each] for each in several] or [[*OF_TAPES.values(), *runs_beside(target)]]):
        state = WaitingState(path, number, None if several else [weakref.ref(v) for v in variables])
        for owner in owners:
            for key, run in owner.present().items():
                state.hand_to(run, key)
        (several[number].states if several else STATES).append(state)


read_marks = gather.read_marks


class KerasState(TensorFlowKerasState):  # type: ignore[misc]
    """Model and optimizer, committed, restored and taken from rank 0 as by Horovod's; residuals stay each rank's own.

    Args:
        model: built, and compiled unless an optimizer is given.
        optimizer: the model's, if none is given.
        **kwargs: more values to keep, as in Horovod's.

    Examples:
        >>> state = hvd_keras.KerasState(model, epoch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer = optimizer or model.optimizer
        if not getattr(optimizer, "built", False):
            optimizer.build(model.trainable_variables)
        super().__init__(model, optimizer=optimizer, **kwargs)
        self._bcast_model = lambda: broadcast_by_position(self._variables(), root_rank=0)

    def _variables(self) -> list[Any]:
        return [tensor_of(v) for v in (*self.model.weights, *variables_in(self.optimizer))]

    def _save_model(self) -> None:
        self._saved = [tf.identity(variable) for variable in self._variables()]

    def _load_model(self) -> None:
        for variable, saved in zip(self._variables(), self._saved, strict=True):
            variable.assign(saved)


class ElasticVariables(ElasticState):
    """The mixin of Horovod's elastic states of a model, or of variables."""

    def save(self) -> None:
        """Save the variables, as all ranks share them, and this rank's residuals."""
        with shared_parameters(_trained(self)):
            super().save()  # type: ignore[misc]
        self._note_own()

    def restore(self) -> None:
        """Restore the variables and this rank's residuals."""
        super().restore()  # type: ignore[misc]
        runs = _runs(self)
        for run in runs:
            run.mode.load(self._oktopk_records.get(run, []))
            if run not in self._oktopk_records:  # it took its first step since
                run.mode.suspend(for_another=True)
        for run in runs:
            run.resume()

    def sync(self) -> None:
        """Give a rank that joins the shared parameters, and no residual; the others' residuals stay."""
        suspend(_trained(self))
        super().sync()  # type: ignore[misc]
        self._note_own()

    def _when_made(self) -> None:
        with shared_parameters(_trained(self)):
            self._save_model()  # type: ignore[attr-defined]
        self._note_own()

    def _note_own(self) -> None:
        self._oktopk_records = {run: run.mode.records() for run in _runs(self)}


def _runs(state: Any) -> list[Run]:
    if isinstance(state, TensorFlowState):
        variables = list(state.variables)
        return list(dict.fromkeys([*each_run_of(variables), *runs_over(key_of(variables))]))
    return list(dict.fromkeys([*each_run_of(state.optimizer), *each_run_of(state.model)]))


def _trained(state: Any) -> Any:
    return list(state.variables) if isinstance(state, TensorFlowState) else state.model
