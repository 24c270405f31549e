"""Variables, the models and optimizers that have them, of either Keras; and a rank's own parameters in variables."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_oktopk.errors import PluginError
from horovod_oktopk.selection.accumulator import Pieces
from horovod_oktopk.selection.replica import Replica
from horovod_oktopk.tensorflow.private import all_layers, eagerly
from horovod_oktopk.vectors.layout import Layout
from horovod_oktopk.vectors.sparse import SparseVector, Values

Array = NDArray[Any]
T = TypeVar("T")


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


class ByVariables(dict[tuple[int, ...], T]):
    """Things by the identities of their variables, with which they go."""

    def keep(self, variables: Iterable[Any], thing: T) -> None:
        """Keep a thing until one of its variables is gone."""
        tensors = list(map(tensor_of, variables))
        key = key_of(tensors)
        self[key] = thing
        for tensor in tensors:
            weakref.finalize(tensor, _forget, weakref.ref(self), key).atexit = False


def _forget(things: weakref.ref[ByVariables[Any]], key: tuple[int, ...]) -> None:
    """Drop a variable's thing as it goes. What calls this lives as long as variables, and must hold none of them."""
    present = things()
    if present is not None:
        present.pop(key, None)


def name_of(variable: Any) -> str:
    """Return a name that is the same on all ranks: Keras 3's path, or TensorFlow's name."""
    return str(getattr(variable, "path", None) or variable.name)


def trained_by(target: Any) -> list[Any]:
    """Return the tf.Variables of a model that are trained, or those in a list of variables."""
    return [tensor_of(v) for v in variables_in(target, "trainable_variables") if is_variable(v)]


def variables_in(target: Any, name: str = "variables") -> list[Any]:
    """Return the variables of a model, layer or optimizer, in the attribute of this name, or those in a list."""
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
    members = (value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
               for value in values)
    found = chain.from_iterable(members)
    return list({id(each): each for each in found if isinstance(each, tf.keras.optimizers.Optimizer)}.values())


def refuse_overwritten(variables: Iterable[Any]) -> None:
    """Raise PluginError for a variable whose "gradient" is its next value: the scales of Keras' float8 layers."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False) is True:
            raise PluginError("float8 training is not supported, as it writes new scales over the variables at every "
                              f"step: use mixed_bfloat16 or mixed_float16; got {name_of(variable)}")


def check_variables(variables: Iterable[Any]) -> None:
    """Raise PluginError for what is no tf.Variable, or one whose shape is not known."""
    for variable in variables:
        if not is_variable(variable):
            raise PluginError("OkTopk reduces gradients of tf.Variables, which last over the steps; got that of "
                              f"{variable!r}: use hvd.allreduce for that")
        if not tensor_of(variable).shape.is_fully_defined():
            raise PluginError("OkTopk keeps a residual for each element, so a variable's shape must be known; "
                              f"'{name_of(variable)}' has {tuple(variable.shape)}: make it without shape=")


class VariableReplica(Replica):
    """A Replica in tf.Variables, in the layout's order.

    Flat arrays are NumPy's: views of TensorFlow's own memory, if that is on the host.
    Whoever holds such a view makes TensorFlow copy the variable when it is written next.
    """

    def __init__(self, layout: Layout, variables: Sequence[tf.Variable]) -> None:
        self._layout = layout
        bounds = layout.offsets.tolist()
        self._parts = list(zip(bounds[:-1], bounds[1:], variables, strict=True))

    def pieces(self) -> Pieces:
        with eagerly():
            return [(start, _read(v)) for start, _, v in self._parts]

    def add(self, delta: SparseVector) -> None:
        with eagerly():
            if len(delta) == self._layout.n:
                for start, stop, v in self._parts:
                    v.assign_add(_value_for(v, delta.values[start:stop]), read_value=False)
                return
            for (_, _, v), part in zip(self._parts, self._layout.parts(delta), strict=True):
                if len(part):
                    _add(v, part)

    def assign(self, values: Values) -> None:
        with eagerly():
            for start, stop, v in self._parts:
                v.assign(_value_for(v, values[start:stop]), read_value=False)

    def swap(self, values: Values) -> None:
        with eagerly():
            for start, stop, v in self._parts:
                before = np.array(_read(v))
                v.assign(_value_for(v, values[start:stop]), read_value=False)
                values[start:stop] = before


def _read(variable: tf.Variable) -> Array:
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    flat: Array = np.asarray(value).reshape(-1)
    return flat


def _value_for(variable: tf.Variable, flat: Array) -> tf.Tensor:
    """Return a copy of the values, whose memory TensorFlow may take over for the variable."""
    return tf.convert_to_tensor(np.array(flat).reshape(variable.shape))


def _add(variable: tf.Variable, part: SparseVector) -> None:
    """Write k elements: on the host with our own loop, which takes a fortieth of the time of TensorFlow's."""
    if not variable.shape.rank:
        variable.assign_add(part.values[0], read_value=False)
    elif "CPU" in variable.device:
        _scatter(variable, part[:0])  # after it the variable shares its memory with nobody
        own = _read(variable)
        memory = (ctypes.c_byte * own.nbytes).from_address(own.ctypes.data)
        part.add_to(np.frombuffer(memoryview(memory), own.dtype))
    else:
        _scatter(variable, part)


def _scatter(variable: tf.Variable, part: SparseVector) -> None:
    """Add the part by TensorFlow's means.

    TensorFlow first copies a variable whose memory somebody holds, and then has all readers copy it until it is told
    otherwise.
    """
    indices = np.stack(np.unravel_index(part.indices, variable.shape), axis=1)
    tf.raw_ops.ResourceScatterNdAdd(ref=variable.handle, indices=indices, updates=part.values)
    tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
