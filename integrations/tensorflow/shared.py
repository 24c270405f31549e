"""The parameters that all ranks share, with `compression=StepAhead(...)`: to be evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.registry import gradient_reducers_of, is_expected, targets_of
from horovod_oktopk.tensorflow.step_ahead import OwnSteps, StepAheadReducer, is_in_use, own_steps_of, step_aheads_over


@contextmanager
def shared_parameters(*targets: Any) -> Iterator[None]:
    """Inside `with shared_parameters(model):` the model holds the parameters that all ranks share.

    It is for evaluating in a program's own training loop, and for weights that are read by other ways than methods of
    Keras' models and functions that save them (`model(x)`, `model.variables`). Inside they are the same on all ranks.
    Outside, with `compression=StepAhead(...)`, each rank's model holds parameters of its own, ahead of the shared
    ones. What is under way is applied first, on this rank alone: no collective is called.

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
    with ExitStack() as stack:
        for reducer in _reducers_of(targets_of("shared_parameters", *targets)):
            stack.enter_context(reducer.flat.shared())
        yield


def suspend(*targets: Any) -> None:
    """The targets hold what all ranks share, until `resume` or the next step; what is not sent yet is kept."""
    for reducer in _reducers_of(targets):
        reducer.flat.suspend()


def resume(model: Any) -> None:
    """Before the gradients of a step: what was suspended goes on, and a state that waits is taken, by all ranks.

    A reducer that is still to come takes its state with the first step, unless it is of the model's one optimizer.
    """
    steps = [each for each in gradient_reducers_of(model) if isinstance(each, OwnSteps)]
    if len(steps) == 1 and steps[0].takes_part and is_expected(steps[0]) and model.built:
        steps[0].reducer_over(model.trainable_variables)
    for each in steps:  # not others that may have had these variables before
        for reducer in each.by_variables().values():
            reducer.resume()


def _reducers_of(targets: Sequence[Any]) -> list[StepAheadReducer]:
    found: dict[StepAheadReducer, None] = {}
    for target in targets if is_in_use() else ():
        steps = own_steps_of(target)
        own = [] if steps is None else steps.by_variables().values()
        found |= dict.fromkeys([*own, *step_aheads_over(_variables_of(target))])
    return list(found)


def _variables_of(target: Any) -> list[Any]:
    if isinstance(target, list | tuple):
        return list(target)
    try:
        found = getattr(target, "variables", ())
    except ValueError:  # tf-keras: a model that has none yet
        return []
    return list(found) if isinstance(found, list | tuple) else []
