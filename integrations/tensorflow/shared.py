"""Actions on a model, an optimizer or variables between steps, and meetings of all ranks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import AgreementError, PluginError
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.tensorflow.registry import all_runs_of, each_run_of, runs_over
from horovod_oktopk.tensorflow.run import Run
from horovod_oktopk.tensorflow.variables import is_variable, variables_in

NONE_YET = ("no gradient of these variables has been reduced with compression=OkTopk(...) yet: call set_density "
            "after the first step")
IN_GRAPH = ("shared_parameters exchanges the values of variables when it is called, so it cannot be part of a "
            "tf.function: call it around the function")


class Target:
    """An Owner: a model, a layer, an optimizer, or a list of variables."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def reports(self) -> list[StepReport]:
        reports = (run.mode.report for run in each_run_of(self._target))
        return [report for report in reports if report is not None]

    def set_density(self, density: float | None) -> None:
        """See Owner. Raise PluginError for variables of tapes that have taken no step."""
        several: list[Any] = [*all_runs_of(self._target)] or [run.mode for run in each_run_of(self._target)]
        if not several:
            raise PluginError(NONE_YET)
        for each in several:
            each.set_density(density)

    def synchronize_replicas(self) -> None:
        for runs in all_runs_of(self._target):
            runs.synchronize_replicas()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See Owner. If a state is loaded inside, all ranks take it together in the end."""
        if not tf.executing_eagerly():
            raise PluginError(IN_GRAPH)
        before = [len(each.states) for each in all_runs_of(self._target)]
        with ExitStack() as stack:
            for run in _runs_of([self._target]):
                stack.enter_context(run.mode.shared())
            yield
        if [len(each.states) for each in all_runs_of(self._target)] != before:
            resume(self._target)


def owners_of(target: Any) -> list[Target] | None:
    """Return what a target has of ours, if it has anything to train; None for what is no target; see `find_by`."""
    if isinstance(target, list | tuple):
        return [Target(list(target))] if target and all(map(is_variable, target)) else None
    if is_variable(target):
        return [Target([target])]
    if not hasattr(type(target), "variables") and not all_runs_of(target):
        return None
    return [Target(target)] if all_runs_of(target) or variables_in(target, "trainable_variables") else []


def suspend(*targets: Any) -> None:
    """Put what all ranks share into the targets, until `resume` or the next step; keep what is not sent yet."""
    for run in _runs_of(targets):
        run.mode.suspend()


def resume(target: Any) -> None:
    """Take a state that waits, on all ranks together, and continue with what was suspended.

    It is for the time before a step's gradients are computed.
    A run that is still to come takes its state with the first step, unless it is of the target's one optimizer.
    """
    several = [each for each in all_runs_of(target) if each.kind.reads_memory and each.takes_part]
    if len(several) == 1 and any(not state.handed for state in several[0].states) and getattr(target, "built", False):
        variables = getattr(target, "trainable_variables", None)
        if variables:
            several[0].run_over(variables)
    for each in several:  # not others that may have had these variables before
        for run in each.present().values():
            run.resume()


def _runs_of(targets: Sequence[Any]) -> list[Run]:
    found: dict[Run, None] = {}
    for target in targets:
        found |= dict.fromkeys(run for run in each_run_of(target) if run.mode.reads_memory)
        found |= dict.fromkeys(runs_over(variables_in(target)))
    return list(found)


def meet(target: Any, doing: str) -> None:
    """Tell the other ranks that this one takes no step now. Collective. doing: "average metrics", say.

    Raise AgreementError, on all ranks, if some take a step or do something else. With `Partial` ranks may take
    different numbers of steps, and meet in `synchronize_replicas`.
    """
    modes = [run.mode for run in each_run_of(target)]
    for mode in sorted(modes, key=lambda each: each.ranks.channel):  # as they first stepped
        if mode.ranks.takes_part and not mode.has_rounds:
            mode.meet(doing)


def check_alike(what: str, names: Iterable[str]) -> None:
    """Raise AgreementError, on all ranks, if these are not the same. Collective."""
    theirs = hvd.allgather_object(list(names), name="horovod_oktopk.alike")
    if any(each != theirs[0] for each in theirs):
        found = "; ".join(f"rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(theirs))
        raise AgreementError(f"the ranks have different {what} ({found}): compile and fit the model alike on all "
                             "ranks")
