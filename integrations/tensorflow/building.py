"""With `compression=StepAhead(...)`: `fit` builds a model, which its first batch would build, before callbacks begin.

So a broadcast at the beginning has all variables, and ranks are alike before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import tensorflow as tf

from horovod_oktopk.tensorflow.keras_models import wrap_once
from horovod_oktopk.tensorflow.step_ahead import own_steps_of
from horovod_oktopk.tensorflow.versions import KERAS_3


def install() -> None:
    """Wraps where Keras has the data, and has not begun; once."""
    if KERAS_3:
        owner = next(cls for cls in tf.keras.Model.__mro__ if "_maybe_symbolic_build" in vars(cls))
        wrap_once(owner, "_maybe_symbolic_build", _wrap_maybe_build)
    else:
        source = tf.keras.Model.__module__.partition(".src.")[0]
        wrap_once(import_module(f"{source}.src.engine.data_adapter"), "get_data_handler", _wrap_data_handler)


def _wrap_maybe_build(maybe_build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(maybe_build)
    def wrapped(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        maybe_build(self, iterator, data_batch)
        if iterator is not None and _is_to_be_built(self):
            _build(lambda: self._symbolic_build(data_batch=iterator._distributed_dataset.element_spec))

    return wrapped


def _wrap_data_handler(get_data_handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_data_handler)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        handler, model = get_data_handler(*args, **kwargs), kwargs.get("model")
        if _is_to_be_built(model):
            _build(lambda: _call_on(model, handler._dataset.element_spec))
        return handler

    return wrapped


def _is_to_be_built(model: Any) -> bool:
    return own_steps_of(model) is not None and not model.built


def _call_on(model: Any, spec: Any) -> None:
    x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(spec)
    tf.function(lambda x: model(x, training=False)).get_concrete_function(x)


def _build(build: Callable[[], None]) -> None:
    """Leaves a model that cannot be built so to its first step, which tells all ranks if they differ."""
    with suppress(Exception):
        build()
