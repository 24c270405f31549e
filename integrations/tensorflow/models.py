"""Which optimizers a Keras model has: that of `compile`, and those of a training step of its own (a GAN's)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.partial.options import Partial
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.step_ahead.options import StepAhead

ADAFACTOR_EPSILON = 1e-12
"""The least epsilon_1 whose square is safe in float32."""


def check_optimizer(optimizer: Any, options: Scheme | Partial | StepAhead) -> None:
    """Raises PluginError for Keras' Adafactor, unless its epsilon_1 suits updates that are mostly zeros; and, with
    StepAhead, for averages of variables, and for several optimizers in one.

    It divides by the root of a row's mean square times a column's. In rows and columns of zeros these are epsilon_1
    (1e-30), whose square is 0 in float32: 0 / 0 makes all weights of the variable NaN. With StepAhead its gradients
    are dense.
    """
    if isinstance(options, StepAhead):
        if getattr(optimizer, "use_ema", False):
            raise PluginError("use_ema=True averages the variables of each rank, which differ with StepAhead: "
                              "average what all ranks share, inside shared_parameters(model), or use OkTopk")
        if isinstance(optimizer, getattr(tf.keras.optimizers, "MultiOptimizer", ())):
            raise PluginError("MultiOptimizer has no learning rate to be multiplied by StepAhead's coefficient and "
                              "gain, as each optimizer in it has its own: use OkTopk")
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    density = options.scheme.density if isinstance(options, Partial) else options.density
    if density != 1 and isinstance(inner, tf.keras.optimizers.Adafactor) and inner.epsilon_1 < ADAFACTOR_EPSILON:
        raise PluginError("Keras' Adafactor makes weights NaN if a row and a column of a gradient are all zeros, as "
                          f"in sparse updates: give Adafactor(epsilon_1={ADAFACTOR_EPSILON:g}); got "
                          f"epsilon_1={inner.epsilon_1:g}")


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that a model, or one inside it, has as attributes, alone or in a list, tuple or dict.

    Each once, in the order in which they were set: the same on all ranks that run the same program.
    """
    models = [layer for layer in model._flatten_layers() if isinstance(layer, tf.keras.Model)]
    values = [value for each in models for value in vars(each).values()]
    found = (member for value in values for member in _members(value))
    return list({id(each): each for each in found if isinstance(each, tf.keras.optimizers.Optimizer)}.values())


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
