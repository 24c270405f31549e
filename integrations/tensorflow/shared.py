"""The parameters that all ranks share, with `compression=StepAhead(...)`: to be evaluated and saved.

Keras' models see to it by themselves. While they evaluate, predict and save, between the epochs of `fit` and after it
they hold what all ranks share; while they train, each rank's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from ..errors import PluginError
from .registry import tensor_of
from .registry import gradient_reducers_of, is_expected
from .step_ahead import OwnSteps, StepAheadReducer, is_in_use, own_steps_of, step_aheads_over

READERS = ("evaluate", "predict", "test_on_batch", "predict_on_batch", "get_weights", "save", "save_weights", "export",
           "__reduce__", "__deepcopy__")
"""Methods of Keras' models and layers that read weights."""
WRITERS = ("set_weights", "load_weights", "compile")
"""Those that set weights, or replace the optimizer."""
TRAINERS = ("train_on_batch",)
"""Those that take a step, beside `fit`."""

Logs = dict[str, Any] | None
Method = Callable[..., Any]


@contextmanager
def shared_parameters(*targets: Any) -> Iterator[None]:
    """Inside `with shared_parameters(model):` the model holds the parameters that all ranks share.

    targets: models, layers, optimizers, or lists of variables. To evaluate and to save in a program's own training
    loop, and where it reads weights by other ways than Keras' methods (`model(x)`, tf.train.Checkpoint). There they are
    the same on all ranks. Outside, with `compression=StepAhead(...)`, each rank's model holds parameters of its own,
    ahead of the shared ones. What is under way is applied first, on this rank alone: no collective is called. What is
    not trained with StepAhead is left alone.
    Raises PluginError inside a tf.function.
    """
    if not tf.executing_eagerly():
        raise PluginError("shared_parameters exchanges the values of variables when it is called, so it cannot be "
                          "part of a tf.function: call it around the function")
    with ExitStack() as stack:
        for reducer in _reducers_of(targets):
            stack.enter_context(reducer.flat.shared())
        yield


def suspend(*targets: Any) -> None:
    """The targets hold what all ranks share, until the next step begins anew with what is not sent yet."""
    for reducer in _reducers_of(targets):
        reducer.flat.suspend()


def resume(model: Any) -> None:
    """Before the gradients of a step: what was suspended goes on, and a state that waits is taken, by all ranks.

    A reducer that is still to come has its state with the first step, unless it is of the model's one optimizer.
    """
    steps = [each for each in gradient_reducers_of(model) if isinstance(each, OwnSteps)]
    if len(steps) == 1 and steps[0].takes_part and is_expected(steps[0]) and model.built:
        steps[0].reducer_over(model.trainable_variables)
    for reducer in _reducers_of([model]):
        reducer.resume()


def install() -> None:
    """Wraps the methods of Keras' models and layers; once."""
    for cls in (tf.keras.Model, tf.keras.layers.Layer):
        for names, wrap in ((READERS, _wrap_reader), (WRITERS, _wrap_writer), (TRAINERS, _wrap_trainer),
                            (("fit",), _wrap_fit)):
            for name in names:
                _wrap_method(cls, name, wrap)


def _reducers_of(targets: Any) -> list[StepAheadReducer]:
    found: dict[StepAheadReducer, None] = {}
    for target in targets if is_in_use() else ():
        steps = own_steps_of(target)
        own = [] if steps is None else list(steps.reducers.values())
        found |= dict.fromkeys([*own, *step_aheads_over(_variables_of(target))])  # type: ignore[list-item]
    return list(found)


def _variables_of(target: Any) -> list[Any]:
    if isinstance(target, list | tuple):
        return list(target)
    try:
        found = getattr(target, "variables", ())
    except ValueError:  # tf-keras: a model that has none yet
        return []
    return list(found) if isinstance(found, list | tuple) else []


def _wrap_method(cls: Any, name: str, wrap: Callable[[Method], Method]) -> None:
    """Of the class of Keras that has the method; Python's own are left alone."""
    owner = next((each for each in cls.__mro__ if name in vars(each)), object)
    if owner is not object and not hasattr(vars(owner)[name], "_oktopk_shared"):
        wrapped: Any = wrap(vars(owner)[name])
        wrapped._oktopk_shared = True
        setattr(owner, name, wrapped)


def _wrap_reader(method: Method) -> Method:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_in_use() or not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        with shared_parameters(self):
            return method(self, *args, **kwargs)

    return wrapped


def _wrap_writer(method: Method) -> Method:
    """What is written is shared: the next step begins anew with it, and with a roll call."""
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        suspend(self)
        return method(self, *args, **kwargs)

    return wrapped


def _wrap_trainer(method: Method) -> Method:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        resume(self)
        return method(self, *args, **kwargs)

    return wrapped


def _wrap_fit(fit: Method) -> Method:
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        given, callback = call.arguments.get("callbacks"), BetweenEpochs()
        if isinstance(given, tf.keras.callbacks.CallbackList):
            given.append(callback)
        else:
            call.arguments["callbacks"] = [callback, *tf.nest.flatten(given or [])]
        try:
            return fit(*call.args, **call.kwargs)
        finally:
            callback.leave()

    return wrapped


class BetweenEpochs(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Has the model hold what all ranks share between epochs, and when training has ended; the first of the list."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = ExitStack()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.leave()
        resume(self.model)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._inside.enter_context(shared_parameters(self.model))

    def on_train_end(self, logs: Logs = None) -> None:
        self.leave()
        suspend(self.model)

    def leave(self) -> None:
        """This rank's own parameters come back."""
        self._inside.close()
