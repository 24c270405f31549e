"""The parameters that all ranks share, to be evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from horovod_oktopk.torch.registry import runs_of


@contextmanager
def shared_parameters(*targets: Any) -> Iterator[None]:
    """Within a `with` block, give the model the parameters that all ranks share.

    That is the place to evaluate, to save, and to load: there the model is the same on all ranks. Outside, with
    `compression=StepAhead(...)`, each rank's model holds parameters of its own, ahead of the shared ones. What is
    under way is applied first, on this rank alone: no collective is called. Model and optimizer are to be saved
    inside. If they are loaded inside as well, this rank's own parameters are there when it ends, and a resumed run
    has the same bits.

    Args:
        *targets: optimizers, models (of all optimizers that train one of their parameters), or lists of these. What
            is trained without `StepAhead` has nothing else, and is left alone.

    Returns:
        A context manager.

    Raises:
        PluginError: A target is neither an optimizer nor a model.

    Examples:
        >>> with shared_parameters(optimizer):
        ...     validate(model)
        ...     save(model, optimizer)
    """
    with ExitStack() as stack:
        for run in runs_of("shared_parameters", *targets):
            stack.enter_context(run.shared())
        yield


def synchronize_replicas(*targets: Any) -> None:
    """Make the replicas of a `Partial` optimizer equal.

    It is called on all ranks together: before evaluation, checkpoints and any collective
    of your own, and after the last step. A rank that is here serves the others' rounds until all are. Gradients that
    no step has handed in yet stay where they are. Without `Partial` it does nothing.

    Args:
        *targets: optimizers that were made with `compression=Partial(...)`, or their models, or lists of these.

    Raises:
        PluginError: A target is neither an optimizer nor a model.

    Examples:
        >>> synchronize_replicas(optimizer)
    """
    for run in runs_of("synchronize_replicas", *targets):
        run.synchronize_replicas()
