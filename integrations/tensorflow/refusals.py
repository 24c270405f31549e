"""The Keras optimizers that cannot be distributed, with each mode."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.make import kind_of

ADAFACTOR_EPSILON = 1e-12
"""The least epsilon_1 whose square is safe in float32."""


def check_optimizer(optimizer: Any, options: Any, passes: int) -> Any:
    """Return the optimizer that takes the steps: the given one, or the one inside that loss scaling has wrapped.

    Raise PluginError if the options' mode cannot serve it.
    """
    kind, scheme = kind_of(options), getattr(options, "scheme", options)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if kind.has_rounds:
        _check_rounds(kind, optimizer is not inner, passes)
    if kind.reads_memory:
        _check_moves(inner)
        return inner  # it takes the steps, whose wrapper looks for overflow first
    if scheme.density != 1 and isinstance(inner, tf.keras.optimizers.Adafactor):
        _check_adafactor(inner)
    return optimizer


def _check_rounds(kind: Any, is_scaled: bool, passes: int) -> None:
    if is_scaled:
        kind.check("scaler")
    if passes != 1:
        raise PluginError(f"Partial takes backward_passes_per_step=1; got {passes!r}. Keras' "
                          "gradient_accumulation_steps can be used")


def _check_moves(optimizer: Any) -> None:
    if getattr(optimizer, "use_ema", False):
        raise PluginError("use_ema=True averages the variables of each rank, which differ with StepAhead: "
                          "average what all ranks share, inside shared_parameters(model), or use OkTopk")
    if isinstance(optimizer, getattr(tf.keras.optimizers, "MultiOptimizer", ())):
        raise PluginError("MultiOptimizer has no learning rate to be multiplied by StepAhead's coefficient and "
                          "gain, as each optimizer in it has its own: use OkTopk")


def _check_adafactor(optimizer: Any) -> None:
    """Raise PluginError for Keras' Adafactor, unless its epsilon_1 suits updates that are mostly zeros.

    It divides by the root of a row's mean square times a column's. In rows and columns of zeros these are epsilon_1
    (1e-30), whose square is 0 in float32: 0 / 0 makes all weights of the variable NaN.
    """
    if optimizer.epsilon_1 < ADAFACTOR_EPSILON:
        raise PluginError("Keras' Adafactor makes weights NaN if a row and a column of a gradient are all zeros, as "
                          f"in sparse updates: give Adafactor(epsilon_1={ADAFACTOR_EPSILON:g}); got "
                          f"epsilon_1={optimizer.epsilon_1:g}")
