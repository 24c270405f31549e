"""Distributed optimizers for Keras programs, and models that are loaded with them."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.plugin import distribute_optimizer


def DistributedOptimizer(optimizer: Any, *, compression: Any = hvd.Compression.none,  # noqa: N802 (Horovod's name)
                         op: Any = hvd.Average, sparse_as_dense: bool = False, backward_passes_per_step: int = 1,
                         average_aggregated_gradients: bool = False, process_set: Any = hvd.global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """Make a Keras optimizer reduce gradients over the ranks, and return it: it is changed in place.

    A saved model, and a model's copy, hold the plain optimizer; see `load_model`. The arguments after `compression`
    are those of horovod.tensorflow.keras.DistributedOptimizer, which also has names, devices, groups and predivision.

    Args:
        optimizer: an optimizer of Keras 3 or tf-keras.
        compression: `OkTopk(...)`, `StepAhead(...)`, `Partial(...)`, or one of Horovod's for a dense allreduce.
        op: `hvd.Average` or `hvd.Sum`.
        sparse_as_dense: reduce sparse gradients (tf.IndexedSlices) as dense ones.
        backward_passes_per_step: gradients of so many passes are added up locally before they are reduced.
        average_aggregated_gradients: divide what was added up by the number of passes.
        process_set: the ranks that reduce together.
        scale_local_gradients: divide the gradients of variables that are not reduced by the number of ranks.

    Returns:
        The optimizer that was given.

    Raises:
        PluginError: It is no Keras optimizer, or is distributed already; or in a scope of tf.distribute.
        OptionError: The compression is none of these.

    Examples:
        >>> optimizer = hvd_keras.DistributedOptimizer(
        ...     keras.optimizers.SGD(0.1), compression=hvd_keras.OkTopk(density=0.01))
    """
    return distribute_optimizer(
        optimizer, compression, op=op, sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step, average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set, scale_local_gradients=scale_local_gradients)


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
