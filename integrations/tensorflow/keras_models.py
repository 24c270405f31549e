"""Keras' models, of either Keras, with `compression=StepAhead(...)`.

While they evaluate, predict and save, between the epochs of `fit` and after it they hold what all ranks share; while
they train, each rank's own. Nobody has to remember that, and the order of callbacks does not matter.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from horovod_oktopk.tensorflow.shared import resume, shared_parameters, suspend
from horovod_oktopk.tensorflow.step_ahead import is_in_use, is_made, step_aheads_over

Method = Callable[..., Any]


def install() -> None:
    """Wraps the methods of Keras' models and layers; once."""
    for cls in (tf.keras.Model, tf.keras.layers.Layer):
        for name, wrap in METHODS.items():
            _wrap_method(cls, name, wrap)


def _wrap_method(cls: Any, name: str, wrap: Callable[[Method], Method]) -> None:
    """Of the class of Keras that has the method; Python's own are left alone."""
    owner = next((each for each in cls.__mro__ if name in vars(each)), object)
    if owner is not object:
        wrap_once(owner, name, wrap)


def wrap_once(owner: Any, name: str, wrap: Callable[[Method], Method]) -> None:
    """Of a class or a module that has the function itself."""
    if not hasattr(vars(owner)[name], "_oktopk_shared"):
        wrapped: Any = wrap(vars(owner)[name])
        wrapped._oktopk_shared = True
        setattr(owner, name, wrapped)


def reads_shared(method: Method) -> Method:
    """Of a model, or of a function whose first argument is one: inside, the model holds what all ranks share."""
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_in_use() or not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        with shared_parameters(self):
            return method(self, *args, **kwargs)

    return wrapped


def _wrap_state_tree(get_state_tree: Method) -> Method:
    """Its leaves are the variables themselves, which go on to change: here copies."""
    @functools.wraps(get_state_tree)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tree = get_state_tree(self, *args, **kwargs)
        if not is_in_use() or not step_aheads_over(self.trainable_variables):
            return tree
        return tf.nest.map_structure(lambda leaf: tf.identity(leaf) if isinstance(leaf, tf.Variable) else leaf, tree)

    return reads_shared(wrapped)


def writes_shared(method: Method) -> Method:
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
        if not is_made():
            return fit(self, *args, **kwargs)
        try:
            call = signature.bind(self, *args, **kwargs)
        except TypeError:  # Keras says it better
            return fit(self, *args, **kwargs)
        with BetweenEpochs.first_of(call.arguments.get("callbacks"), self) as callbacks:
            call.arguments["callbacks"] = callbacks
            return fit(*call.args, **call.kwargs)

    return wrapped


METHODS: dict[str, Callable[[Method], Method]] = {
    "fit": _wrap_fit, "train_on_batch": _wrap_trainer,
    **dict.fromkeys(("evaluate", "predict", "test_on_batch", "predict_on_batch", "get_weights", "save",
                     "save_weights", "export", "__reduce__", "__deepcopy__"), reads_shared),
    "get_state_tree": _wrap_state_tree,
    **dict.fromkeys(("set_weights", "load_weights", "set_state_tree", "quantize", "compile"), writes_shared)}


class BetweenEpochs(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Has the model hold what all ranks share between epochs, and when training has ended; the first of the list."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = ExitStack()

    @classmethod
    @contextmanager
    def first_of(cls, given: Any, model: Any) -> Iterator[Any]:
        """Gives what `fit` is to be given for callbacks. A CallbackList stays the program's own, and is as before
        afterwards.
        """
        callback = cls()
        is_list = isinstance(given, tf.keras.callbacks.CallbackList)
        if is_list:
            callback.set_model(model)
            given.callbacks.insert(0, callback)
        try:
            yield given if is_list else [callback, *tf.nest.flatten(given or [])]
        finally:
            callback.leave()
            if is_list:
                given.callbacks.remove(callback)

    def on_epoch_begin(self, *_: Any) -> None:
        """This rank's own parameters come back."""
        self.leave()
        resume(self.model)

    def on_epoch_end(self, *_: Any) -> None:
        """Whatever looks at the model now sees what all ranks share."""
        self._inside.enter_context(shared_parameters(self.model))

    def on_train_end(self, *_: Any) -> None:
        """The last exchange is applied."""
        self.leave()
        suspend(self.model)

    def leave(self) -> None:
        """Ends what `on_epoch_end` has begun."""
        self._inside.close()
