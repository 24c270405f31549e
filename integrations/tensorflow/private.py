"""The private names of other packages that this integration needs; it uses no others. And which Keras there is.

SEEN has the versions in which they were seen, NAMES what a test looks for when one changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

KERAS_3 = hasattr(tf.keras, "ops")
"""Otherwise it is tf-keras (TF_USE_LEGACY_KERAS=1)."""
KERAS = f"Keras {tf.keras.__version__}" if KERAS_3 else "tf-keras"


SEEN = {"horovod": "0.28.1", "tensorflow": "2.18", **({"keras": "3.15"} if KERAS_3 else {"tf_keras": "2.18"})}
NAMES = (
    "tensorflow.python.eager.context:eager_mode",
    "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
    "horovod.tensorflow:_make_allreduce_grads_fn",
    "horovod.tensorflow.mpi_ops:_basics.MPI_LIB_CTYPES.horovod_shutdown",
    "horovod.tensorflow.elastic:TensorFlowKerasState._save_model",
    "horovod.tensorflow.elastic:TensorFlowKerasState._load_model",
    "horovod.tensorflow.elastic:TensorFlowState._save_model",
    f"{tf.keras.Model.__module__}:Model._flatten_layers",
    f"{tf.keras.optimizers.Optimizer.__module__}:Optimizer._trackable_children",
)
"""Modules and what is in them. Of optimizers: `_learning_rate`; of Keras 3's `_trainable_variables`; of RMSprop
`_momentums`."""


def eagerly() -> AbstractContextManager[None]:
    """Return a context in which operations run at once, also in the threads in which a graph runs Python."""
    return context.eager_mode()  # type: ignore[no-any-return]


def is_compiled_by_xla() -> bool:
    """Return True in a graph that XLA compiles."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def dense_allreduce(*options: Any) -> Any:
    """Return stock Horovod's function that reduces gradients of tf.Variables, by DistributedOptimizer's options."""
    return hvd._make_allreduce_grads_fn("DistributedOptimizer", *options)


def all_layers(model: Any) -> list[Any]:
    """Return a model's layers, at any depth, itself included."""
    return list(model._flatten_layers())


def learning_rate_of(optimizer: Any) -> Any:
    """Return the variable of an optimizer's learning rate, or its schedule; None for one that has neither."""
    return getattr(optimizer, "_learning_rate", None)


def built_with(optimizer: Any) -> list[Any]:
    """Return the variables that a Keras 3 optimizer was built with; none of anything else."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def sums_up_steps(optimizer: Any) -> bool:
    """Return True for SGD and RMSprop with momentum, also inside loss scaling.

    Their velocity is a sum of steps, with learning rates in it. What Muon and Adam keep is a mean of gradients alone.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kinds = (tf.keras.optimizers.SGD, tf.keras.optimizers.RMSprop)
    return isinstance(inner, kinds) and bool(inner.momentum)


def velocities(optimizer: Any) -> list[Any]:
    """Return the variables in which an optimizer sums up its steps; none before it is built."""
    if not sums_up_steps(optimizer):
        return []
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "momentums" if isinstance(inner, tf.keras.optimizers.SGD) else "_momentums", ()))
