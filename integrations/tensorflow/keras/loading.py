"""Keras models that are loaded with a distributed optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.plugin import DistributedOptimizer


def load_model(filepath: Any, custom_objects: Any = None, **arguments: Any) -> Any:
    """Load a model as keras.models.load_model does, and make its optimizer distributed.

    Args:
        filepath: the saved model.
        custom_objects: as in keras.models.load_model.
        **arguments: those of `DistributedOptimizer`.

    Returns:
        The model.

    Raises:
        PluginError: The model has no optimizer.

    Examples:
        >>> model = hvd_keras.load_model(
        ...     "model.keras", compression=hvd_keras.OkTopk(density=0.01))
    """
    model = tf.keras.models.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is None:
        raise PluginError(f"the model in {filepath} has no optimizer: compile it with a distributed one")
    DistributedOptimizer(model.optimizer, **arguments)
    model.jit_compile = False
    return model
