"""Functions that save and load models: with `compression=StepAhead(...)` they save what all ranks share, as models'
own methods do, and what they load is shared.

Programs hold functions such as `keras.saving.save_model` under many names, and may have imported them before us. So
what is wrapped is what these call in the end: of Keras the modules that know files; of TensorFlow the one class that
writes checkpoints, those of tf.saved_model.save and of tf.train.Checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint.async_checkpoint_helper import AsyncCheckpointHelper
from tensorflow.python.checkpoint.checkpoint import TrackableSaver

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.keras_models import reads_shared, wrap_once, writes_shared
from horovod_oktopk.tensorflow.registry import is_variable
from horovod_oktopk.tensorflow.shared import shared_parameters, suspend
from horovod_oktopk.tensorflow.step_ahead import is_in_use, step_aheads_over
from horovod_oktopk.tensorflow.versions import KERAS_3

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


def _of_second(load: Function) -> Function:
    """Of a file's group, and a model."""
    @functools.wraps(load)
    def wrapped(group: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        suspend(model)
        return load(group, model, *args, **kwargs)

    return wrapped


WRAPPED: dict[str, dict[str, Wrap]] = {
    "saving.saving_lib": {"save_model": reads_shared, "save_weights_only": reads_shared,
                          "load_weights_only": writes_shared},
    **({"legacy.saving.legacy_h5_format": {"save_model_to_hdf5": reads_shared,
                                           "load_weights_from_hdf5_group": _of_second,
                                           "load_weights_from_hdf5_group_by_name": _of_second}}
       if KERAS_3 else
       {"saving.legacy.save": {"save_model": reads_shared, "save_weights": reads_shared,
                               "load_weights": writes_shared}})}
"""Functions of a model, by Keras' modules."""

IN_A_GRAPH = ("a checkpoint that is written inside a tf.function would hold this rank's own parameters with StepAhead"
              ": write it outside, where it holds what all ranks share")


def install() -> None:
    """Wraps them; once."""
    source = tf.keras.Model.__module__.partition(".src.")[0] + ".src."
    for module, functions in WRAPPED.items():
        for name, wrap in functions.items():
            wrap_once(import_module(source + module), name, wrap)
    wrap_once(TrackableSaver, "save", lambda save: _of_variables(_of_saver, save))
    wrap_once(TrackableSaver, "restore", _wrap_restore)
    for name in ("save", "_write"):
        wrap_once(AsyncCheckpointHelper, name, lambda save: _of_variables(_of_asynchronous, save))


def _of_saver(saver: Any) -> list[Any]:
    """The variables that it writes; none where a thread writes copies of them."""
    return [] if saver._object_map else _variables_in(saver._graph_view)


def _of_asynchronous(helper: Any) -> list[Any]:
    """The variables that it copies, for a thread to write."""
    return _variables_in(tf.train.TrackableView(helper.checkpointer()))


def _variables_in(view: Any) -> list[Any]:
    return [each for each in view.descendants() if is_variable(each)]


def _of_variables(variables_of: Callable[[Any], list[Any]], save: Function) -> Function:
    @functools.wraps(save)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        variables = variables_of(self) if is_in_use() else []
        if not step_aheads_over(variables):
            return save(self, *args, **kwargs)
        if not tf.executing_eagerly():
            raise PluginError(IN_A_GRAPH)
        with shared_parameters(variables):
            return save(self, *args, **kwargs)

    return wrapped


def _wrap_restore(restore: Function) -> Function:
    """What is restored is shared, as with `load_weights`."""
    @functools.wraps(restore)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_in_use() and tf.executing_eagerly():
            suspend(_variables_in(self._graph_view))
        return restore(self, *args, **kwargs)

    return wrapped
