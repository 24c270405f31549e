"""Models that are loaded with a distributed optimizer, and the elastic state of a model, of either Keras."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.elastic import TensorFlowKerasState

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.plugin import DistributedOptimizer
from horovod_oktopk.tensorflow.variables import tensor_of, variables_in


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


class KerasState(TensorFlowKerasState):  # type: ignore[misc]
    """Model and optimizer, committed, restored and taken from rank 0 as by Horovod's; residuals stay each rank's own.

    Args:
        model: built, and compiled unless an optimizer is given.
        optimizer: the model's, if none is given.
        **kwargs: more values to keep, as in Horovod's.

    Examples:
        >>> state = hvd_keras.KerasState(model, epoch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer = optimizer or model.optimizer
        if not getattr(optimizer, "built", False):
            optimizer.build(model.trainable_variables)
        super().__init__(model, optimizer=optimizer, **kwargs)
        self._bcast_model = lambda: hvd.broadcast_variables(self._variables(), root_rank=0)

    def _variables(self) -> list[Any]:
        return [tensor_of(v) for v in (*self.model.weights, *variables_in(self.optimizer))]

    def _save_model(self) -> None:
        self._saved = [tf.identity(variable) for variable in self._variables()]

    def _load_model(self) -> None:
        for variable, saved in zip(self._variables(), self._saved, strict=True):
            variable.assign(saved)
