"""This rank's own parameters in tf.Variables, as step-ahead error feedback sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_oktopk.kernels import KERNELS
from horovod_oktopk.modes.step_ahead.replica import Replica
from horovod_oktopk.selection.parameter_accumulator import Pieces
from horovod_oktopk.tensorflow.layout import TensorLayout
from horovod_oktopk.tensorflow.private import eagerly
from horovod_oktopk.vectors.sparse import DenseVector, SparseVector, Values

Array = NDArray[Any]


class VariableReplica(Replica):
    """A Replica in tf.Variables, in the layout's order.

    Flat arrays are NumPy's: views of TensorFlow's own memory, if that is on the host.
    Whoever holds such a view makes TensorFlow copy the variable when it is written next.
    """

    def __init__(self, layout: TensorLayout, variables: Sequence[tf.Variable]) -> None:
        self._layout = layout
        self._variables = list(variables)
        self._offsets = layout.offsets[:-1].tolist()

    def pieces(self) -> Pieces:
        with eagerly():
            return [(offset, _read(v)) for offset, v in zip(self._offsets, self._variables, strict=True)]

    def add(self, delta: SparseVector | DenseVector) -> None:
        with eagerly():
            if isinstance(delta, DenseVector):
                for (start, stop), v in zip(self._bounds(), self._variables, strict=True):
                    v.assign_add(_value_for(v, delta.values[start:stop]), read_value=False)
                return
            for v, part in zip(self._variables, self._layout.parts(delta), strict=True):
                if len(part):
                    _add(v, part)

    def assign(self, values: Values) -> None:
        with eagerly():
            for (start, stop), v in zip(self._bounds(), self._variables, strict=True):
                v.assign(_value_for(v, values[start:stop]), read_value=False)

    def swap(self, values: Values) -> None:
        with eagerly():
            for (start, stop), v in zip(self._bounds(), self._variables, strict=True):
                before = np.array(_read(v))
                v.assign(_value_for(v, values[start:stop]), read_value=False)
                values[start:stop] = before

    def logical(self, values: Values) -> Values:
        return values

    def in_memory(self, values: Values) -> Values:
        return values

    def _bounds(self) -> Iterator[tuple[int, int]]:
        return zip(self._offsets, self._layout.offsets[1:].tolist(), strict=True)


def _read(variable: tf.Variable) -> Array:
    """All elements, flat."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    flat: Array = np.asarray(value).reshape(-1)
    return flat


def _value_for(variable: tf.Variable, flat: Array) -> tf.Tensor:
    """In memory of its own, which TensorFlow may take over for the variable."""
    return tf.convert_to_tensor(np.array(flat).reshape(variable.shape))


def _add(variable: tf.Variable, part: SparseVector) -> None:
    """Write k elements: on the host with our own loop, which takes a fortieth of the time of TensorFlow's."""
    if not variable.shape.rank:
        variable.assign_add(part.values[0], read_value=False)
    elif "CPU" in variable.device:
        _scatter(variable, part[:0])  # after it the variable shares its memory with nobody
        own = _read(variable)
        memory = (ctypes.c_byte * own.nbytes).from_address(own.ctypes.data)
        KERNELS.add(np.frombuffer(memoryview(memory), own.dtype), part.indices, part.values)
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
