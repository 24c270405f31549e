"""Actions of all ranks together: evaluate and save the parameters that they share, and meet before a callback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import AgreementError, PluginError
from horovod_oktopk.tensorflow.registry import all_runs_of, each_run_of, expected_states, runs_over, targets_of
from horovod_oktopk.tensorflow.run import Run
from horovod_oktopk.tensorflow.variables import variables_in


@contextmanager
def shared_parameters(*targets: Any) -> Iterator[None]:
    """Within a `with` block, give the model the parameters that all ranks share.

    In a training loop of your own, evaluate, save and load inside this block: there the model is the same on all
    ranks. Outside, with `compression=StepAhead(...)`, each rank's model holds parameters of its own, ahead of the
    shared ones. An exchange under way is applied first, on this rank alone. Entering the block calls no collective;
    leaving it does, if `load_state` was called inside: then all ranks take the state together.

    Args:
        *targets: models, layers, optimizers, or lists of variables or of these. What is not trained with `StepAhead`
            is left alone.

    Returns:
        A context manager.

    Raises:
        PluginError: It is inside a tf.function; or a target has no variables.

    Examples:
        >>> with shared_parameters(model):
        ...     prediction = model(x)
    """
    if not tf.executing_eagerly():
        raise PluginError("shared_parameters exchanges the values of variables when it is called, so it cannot be "
                          "part of a tf.function: call it around the function")
    found, states = targets_of("shared_parameters", *targets), expected_states()
    with ExitStack() as stack:
        for run in _runs_of(found):
            stack.enter_context(run.mode.shared())
        yield
    if expected_states() > states:
        for target in found:
            resume(target)


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
    if len(several) == 1 and several[0].is_expected and getattr(target, "built", False):
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
        if mode.ranks.takes_part:
            mode.meet(doing)
            mode.leave()


def check_alike(what: str, names: Iterable[str]) -> None:
    """Raise AgreementError, on all ranks, if these are not the same. Collective."""
    theirs = hvd.allgather_object(list(names), name="horovod_oktopk.alike")
    if any(each != theirs[0] for each in theirs):
        found = "; ".join(f"rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(theirs))
        raise AgreementError(f"the ranks have different {what} ({found}): compile and fit the model alike on all "
                             "ranks")
