"""The functions that programs call between steps, in every framework; an integration tells whom a target means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from typing import Any, Protocol

from ..errors import PluginError
from ..schemes.report import StepReport


class Owner(Protocol):
    """An optimizer, or some variables, with the exchange that this package makes of it."""

    def reports(self) -> Iterable[StepReport]:
        """Return the last report of each exchange; of one that has made no step, none."""

    def set_density(self, density: float | None) -> None:
        """Select another fraction from the next step on."""

    def catch_up(self) -> None:
        """Apply the exchange under way, if there is one; on this rank alone."""

    def synchronize_replicas(self) -> None:
        """Make replicas equal, if they may differ. Collective."""

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the parameters that all ranks share."""


_finders: list[tuple[Callable[[Any], Iterable[Owner] | None], str]] = []


def find_by(find: Callable[[Any], Iterable[Owner] | None], kinds: str) -> None:
    """Have a function tell the owners of a target; it returns None for what is none of these kinds."""
    _finders.append((find, kinds))


def find_owners(function: str, *targets: Any) -> list[Owner]:
    """Return the owners of the targets, and of those in lists and tuples; each once.

    Raise PluginError, which names the function that was called with them, for a target of no known kind.
    """
    found: dict[Owner, None] = {}
    for target in targets:
        owners = next((each for find, _ in _finders if (each := find(target)) is not None), None)
        if owners is None and isinstance(target, list | tuple):
            owners = find_owners(function, *target)
        if owners is None:
            raise PluginError(f"{function} takes {', '.join(kinds for _, kinds in _finders)}, or lists of these; got "
                              f"{type(target).__name__}: write {function}(optimizer), or {function}(model)")
        found |= dict.fromkeys(owners)
    return list(found)


def _owners_that_reduce(function: str, target: Any) -> list[Owner]:
    owners = find_owners(function, target)
    if not owners:
        raise PluginError(f"{type(target).__name__} was not made with compression=OkTopk(...): give {function} what "
                          "DistributedOptimizer(..., compression=OkTopk(...)) has returned, or its model")
    return owners


def step_report(target: Any) -> StepReport | None:
    """Return what the last reduction did on this rank.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.

    Returns:
        The report of the last step; None before the first. If there are several reductions or optimizers, the report
        of the one that has taken most steps.

    Raises:
        PluginError: Nothing was made with `compression=OkTopk(...)`.

    Examples:
        >>> report = step_report(optimizer)
        >>> print(report.bytes_sent, report.seconds)
    """
    reports = [report for owner in _owners_that_reduce("step_report", target) for report in owner.reports()]
    return max(reports, key=attrgetter("step"), default=None)


def set_density(target: Any, density: float | None) -> None:
    """Select another fraction of the elements, from the next step on.

    All ranks must set it before the same step.

    Args:
        target: an optimizer or a model; for gradients of a tape, the model, or the list of variables.
        density: the fraction, in (0, 1]; None: that of the options again.

    Raises:
        PluginError: Nothing was made with `compression=OkTopk(...)`.
        OptionError: The density is not allowed.

    Examples:
        >>> set_density(optimizer, 0.05)
    """
    for owner in _owners_that_reduce("set_density", target):
        owner.set_density(density)


def catch_up(*targets: Any) -> None:
    """Apply the exchange under way now, and not only when the next step begins.

    For `StepAhead` with overlap, if a step has several backward passes, which add up gradients: call it after one of
    them, such as the first. The passes before it hide the exchange, and those after it compute their gradients where
    the other ranks' moves have arrived. It waits for the exchange if that has not ended, on this rank alone, and
    calls no collective. Where nothing is under way it does nothing. It writes over parameters, so it has no place
    between a forward pass and its backward pass.

    Args:
        *targets: optimizers, models (of all optimizers that train one of their parameters), or lists of these.

    Raises:
        PluginError: A target is none of these; or it is called inside a tf.function.
        AgreementError, NonFiniteError, TransportError: The exchange has failed, as `step` would tell.

    Examples:
        >>> for number, part in enumerate(batch.chunk(2)):
        ...     if number == 1:
        ...         catch_up(optimizer)
        ...     (loss_of(model(part)) / 2).backward()
        >>> optimizer.step()
    """
    for owner in find_owners("catch_up", *targets):
        owner.catch_up()


def synchronize_replicas(*targets: Any) -> None:
    """Make the replicas of a `Partial` optimizer equal.

    It is called on all ranks together, outside of any tf.function: before evaluation, checkpoints and any collective
    of your own, and after the last step. A rank that is here serves the others' rounds until all are. Gradients that
    no step has handed in yet stay where they are. Without `Partial` it does nothing.

    Args:
        *targets: optimizers that were made with `compression=Partial(...)`, or their models, or lists of these.

    Raises:
        PluginError: A target is neither an optimizer nor a model.

    Examples:
        >>> synchronize_replicas(optimizer)
    """
    for owner in find_owners("synchronize_replicas", *targets):
        owner.synchronize_replicas()


@contextmanager
def shared_parameters(*targets: Any) -> Iterator[None]:
    """Within a `with` block, give the model the parameters that all ranks share.

    In a training loop of your own, evaluate, save and load inside this block: there the model is the same on all
    ranks. Outside, with `compression=StepAhead(...)`, each rank's model holds parameters of its own, ahead of the
    shared ones. An exchange under way is applied first, on this rank alone, without a collective. If a state is
    loaded inside, this rank's own parameters are there when it ends (in TensorFlow by a collective), and a resumed
    run has the same bits.

    Args:
        *targets: optimizers, models (of all optimizers that train one of their parameters), layers, variables, or
            lists of these. What is not trained with `StepAhead` is left alone.

    Returns:
        A context manager.

    Raises:
        PluginError: A target is none of these; or it is called inside a tf.function.

    Examples:
        >>> with shared_parameters(optimizer):
        ...     validate(model)
        ...     save(model, optimizer)
    """
    with ExitStack() as stack:
        for owner in find_owners("shared_parameters", *targets):
            stack.enter_context(owner.shared())
        yield
