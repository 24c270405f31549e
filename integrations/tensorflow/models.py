"""Which optimizers a Keras model has: that of `compile`, and those of a training step of its own (a GAN's)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from .versions import KERAS_3

_KINDS = (tf.keras.optimizers.Optimizer, *(() if KERAS_3 else (tf.keras.optimizers.legacy.Optimizer,)))


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that a model, or one inside it, has as attributes, alone or in a list, tuple or dict.

    Each once, in the order in which they were set: the same on all ranks that run the same program.
    """
    models = [layer for layer in model._flatten_layers() if isinstance(layer, tf.keras.Model)]
    values = [value for each in models for value in vars(each).values()]
    found = (member for value in values for member in _members(value) if isinstance(member, _KINDS))
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
