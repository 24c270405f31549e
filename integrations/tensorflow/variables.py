"""Variables, and the models and optimizers that have them, of TensorFlow and of either Keras."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.private import all_layers


def tensor_of(variable: Any) -> Any:
    """Return the tf.Variable of a Keras 3 variable; anything else as it is."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def is_variable(target: Any) -> bool:
    """Return True for a tf.Variable, or a Keras variable that has one."""
    return isinstance(tensor_of(target), tf.Variable)


def key_of(variables: Iterable[Any]) -> tuple[int, ...]:
    """Return the identities of the tf.Variables."""
    return tuple(id(tensor_of(variable)) for variable in variables)


def name_of(variable: Any) -> str:
    """Return a name that is the same on all ranks: Keras 3's path, or TensorFlow's name."""
    return str(getattr(variable, "path", None) or variable.name)


def trained_by(target: Any) -> list[Any]:
    """Return the tf.Variables of a model that are trained, or those in a list of variables."""
    if not isinstance(target, list | tuple):
        target = getattr(target, "trainable_variables", ())
    return [tensor_of(variable) for variable in target if is_variable(variable)]


def variables_in(target: Any, name: str = "variables") -> list[Any]:
    """Return the variables of a model, layer or optimizer, or those in a list. name: of the attribute."""
    if isinstance(target, list | tuple):
        return list(target)
    try:
        found = getattr(target, name, ())
    except ValueError:  # tf-keras: a model that has none yet
        return []
    return list(found) if isinstance(found, list | tuple) else []


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers that a model, or one inside it, has as attributes, alone or in a list, tuple or dict.

    Each comes once, in the order in which they were set: the same on all ranks that run the same program.
    """
    models = [layer for layer in all_layers(model) if isinstance(layer, tf.keras.Model)]
    values = [value for each in models for value in vars(each).values()]
    found = (member for value in values for member in _members(value))
    return list({id(each): each for each in found if isinstance(each, tf.keras.optimizers.Optimizer)}.values())


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def refuse_overwritten(variables: Iterable[Any]) -> None:
    """Raise PluginError for a variable whose "gradient" is its next value: the scales of Keras' float8 layers."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False) is True:
            raise PluginError("float8 training is not supported, as it writes new scales over the variables at every "
                              f"step: use mixed_bfloat16 or mixed_float16; got {name_of(variable)}")


def check_variables(variables: list[Any], gradients: list[Any]) -> None:
    """Raise PluginError unless every gradient belongs to a tf.Variable, which is not overwritten with it."""
    if len(variables) != len(gradients):
        raise PluginError("OkTopk needs the variable of every gradient, to keep what is not sent: got "
                          f"{len(gradients)} gradients and {len(variables)} variables. Give one for each")
    for variable in variables:
        if not isinstance(tensor_of(variable), tf.Variable):
            raise PluginError("OkTopk reduces gradients of tf.Variables, which last over the steps; got that of "
                              f"{variable!r}: use hvd.allreduce for that")
    refuse_overwritten(variables)
