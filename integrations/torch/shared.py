"""The parameters that all ranks share, with `compression=StepAhead(...)`: to be evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from horovod_oktopk.torch.registry import reducers_of
from horovod_oktopk.torch.step_ahead import StepAheadReducer


@contextmanager
def shared_parameters(*targets: Any) -> Iterator[None]:
    """Inside `with shared_parameters(optimizer):` the model holds the parameters that all ranks share.

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
        for reducer in reducers_of("shared_parameters", *targets):
            if isinstance(reducer, StepAheadReducer):
                stack.enter_context(reducer.shared())
        yield
