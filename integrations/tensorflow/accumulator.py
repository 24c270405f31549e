"""The accumulator in host memory, whose spare buffer serves as the memory of the reduced gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.tensorflow.layout import TensorLayout
from horovod_oktopk.tensorflow.private import eagerly

Array = NDArray[Any]
ALIGNMENT = 64
"""Bytes. TensorFlow shares memory that is aligned so, and copies any other."""


class LendingAccumulator(NumpyAccumulator):
    """A NumpyAccumulator that lends its spare buffer between a commit and the next accumulate.

    TensorFlow wants reduced gradients in memory of their own, n elements, just while the spare holds
    nothing. Whoever still holds a lent part when the next step begins may keep it: then the spare is new.
    """

    def __init__(self, layout: TensorLayout) -> None:
        self._layout = layout
        lengths = np.diff(layout.offsets) * layout.dtype.itemsize
        self._starts = np.concatenate([[0], np.cumsum(-(-lengths // ALIGNMENT) * ALIGNMENT)]).tolist()
        super().__init__(layout.n, layout.dtype)

    def accumulate(self, pieces: Iterable[tuple[int, Array]], clear: bool = False) -> bool:
        if self._is_lent():
            _collect()
        if self._is_lent():
            self._acc = self._allocate()
        return super().accumulate(pieces, clear)

    def memory_for(self, index: int) -> Array:
        """Return an array like the index-th gradient, for TensorFlow to take over; after a commit."""
        _, shape, dtype = self._layout.entries[index]
        if np.dtype(tf.as_dtype(dtype).as_numpy_dtype) != self.dtype:
            return new_memory(self._layout, index)
        length = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        return _aligned(self._acc.base)[self._starts[index]:][:length].view(self.dtype).reshape(shape)

    def _is_lent(self) -> bool:
        return sys.getrefcount(self._acc.base) > 2  # beside the spare itself, and the argument of this call

    def _allocate(self) -> Array:
        owner = np.empty(self._starts[-1] + ALIGNMENT, np.uint8)
        owner.fill(0)
        return _aligned(owner)[:self.n * self.dtype.itemsize].view(self.dtype)


def new_memory(layout: TensorLayout, index: int) -> Array:
    """Return an array in the shape and dtype of the index-th gradient, for TensorFlow to take over."""
    _, shape, name = layout.entries[index]
    dtype = np.dtype(tf.as_dtype(name).as_numpy_dtype)
    length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return _aligned(np.empty(length + ALIGNMENT, np.uint8))[:length].view(dtype).reshape(shape)


def _collect() -> None:
    """Make TensorFlow let go of arrays that its kernels are done with: it does so when it converts the next one."""
    with eagerly(), tf.device("/cpu:0"):
        tf.constant(np.zeros(1))


def _aligned(owner: Any) -> Array:
    """Return the owner's bytes from its first aligned address on."""
    memory: Array = owner[-owner.ctypes.data % ALIGNMENT:]
    return memory
