"""The gradients of a step, as tensors and as flat arrays of a Python function; arrays over Horovod's collectives."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_oktopk.modes.gradients import LocalGradients, ReducedGradients
from horovod_oktopk.modes.step_ahead.pace import elements_of_rows
from horovod_oktopk.selection.accumulator import NumpyAccumulator, Piece
from horovod_oktopk.tensorflow.private import eagerly
from horovod_oktopk.tensorflow.variables import Array, key_of, name_of
from horovod_oktopk.transport.horovod import HorovodRanks, HorovodTransport
from horovod_oktopk.vectors.layout import Layout, scatter
from horovod_oktopk.vectors.sparse import Indices, SparseVector, Values


class TensorFlowTransport(HorovodTransport):
    """See HorovodTransport. Calls run at once, also where the program builds graphs."""

    hvd = hvd
    concurrent = False  # run eagerly, all operations of a kind have one name in TensorFlow, whatever they are given
    to_tensor = staticmethod(tf.constant)
    failures = (HorovodInternalError, tf.errors.OpError)

    @staticmethod
    @contextmanager
    def around() -> Iterator[None]:
        with eagerly(), tf.device("/cpu:0"):
            yield


def ranks_of(process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> HorovodRanks:
    """Return the ranks of a process set; see HorovodRanks and Ranks."""
    return HorovodRanks(process_set, TensorFlowTransport, own_channel, yield_cpu)


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(dtype).as_numpy_dtype)


Signature = tuple[str, ...]
Scale = Any
"""A loss scale that gradients hold, a scalar tensor; or None."""
MARK = "_oktopk_reduced"


def is_dense(gradient: Any) -> bool:
    """Return True if a gradient has a place in the flat vector of gradients."""
    return gradient is not None and not isinstance(gradient, tf.IndexedSlices)


def in_float32(reduce: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """Return a function of Horovod's that reduces tensors, for those in bfloat16, too: Horovod has none."""
    def wrapped(tensors: Sequence[Any], *others: Any) -> list[Any]:
        are_narrow = [getattr(each, "dtype", None) == tf.bfloat16 for each in tensors]
        wide = [tf.cast(each, tf.float32) if is_narrow else each
                for each, is_narrow in zip(tensors, are_narrow, strict=True)]
        return [tf.cast(each, tf.bfloat16) if is_narrow else each
                for each, is_narrow in zip(reduce(wide, *others), are_narrow, strict=True)]

    return wrapped


def allreduce(tensor: Any, **options: Any) -> Any:
    """Return what hvd.allreduce does, of a dense or sparse tensor, also in bfloat16."""
    [reduced] = in_float32(lambda tensors: [hvd.allreduce(*tensors, **options)])([tensor])
    return reduced


def mark_reduced(gradients: Sequence[Any]) -> None:
    """Note on gradients that a distributed tape has reduced them."""
    for each in gradients:
        if each is not None:
            setattr(each, MARK, True)


def are_reduced(gradients: Sequence[Any]) -> bool:
    """Return True if a distributed tape has reduced the gradients."""
    given = [each for each in gradients if each is not None]
    return bool(given) and all(getattr(each, MARK, False) for each in given)


def signature_of(variables: Sequence[Any], gradients: Sequence[Any]) -> Signature:
    """Return one line for each variable, which must be the same on all ranks, and at all steps."""
    return tuple(f"parameter {name_of(v)}: {_kind(v, g)}" for v, g in zip(variables, gradients, strict=True))


def _kind(variable: Any, gradient: Any) -> str:
    if gradient is None:
        return "no gradient"
    shape = f"shape {tuple(variable.shape)}, {gradient.dtype.name}"
    return shape if is_dense(gradient) else f"sparse gradient, {shape}"


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Return whether all elements are finite: bool, a scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values_in(gradients)] or [True])


def values_in(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return the values of all gradients that are not None, dense and sparse."""
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]


def without_scale(gradients: Sequence[Any], scale: Scale) -> list[Any]:
    """Return the gradients of the loss, without the scale."""
    return with_scale(gradients, None if scale is None else 1 / scale)


def with_scale(gradients: Sequence[Any], scale: Scale) -> list[Any]:
    """Return the gradients of the scaled loss, as whoever takes the scale out again expects them."""
    def times(values: tf.Tensor) -> tf.Tensor:
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32  # a scale may be too large for float16
        return tf.cast(tf.cast(values, wide) * tf.cast(scale, wide), values.dtype)

    return list(gradients) if scale is None else [with_values(g, times) for g in gradients]


def with_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return a gradient, dense, sparse or None, with other values."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


Form = dict[int, bool]
"""The parts of a layout of which a step has gradients, in their order; True for a sparse one."""


def form_of(variables: Sequence[Any], gradients: Sequence[Any], layout_of: Sequence[Any]) -> Form:
    """Return the form of gradients. The layout is that of the variables `layout_of`."""
    part_of = {key: part for part, key in enumerate(key_of(layout_of))}
    return {part_of[key]: isinstance(gradient, tf.IndexedSlices)
            for key, gradient in zip(key_of(variables), gradients, strict=True) if gradient is not None}


def inputs_of(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return the tensors that a Python function is to be given of these gradients; see OwnArrays."""
    return [tensor for gradient in gradients if gradient is not None for tensor in (
        (gradient.indices, gradient.values) if isinstance(gradient, tf.IndexedSlices) else (gradient,))]


class DenseArrays(ReducedGradients):
    """Dense gradients of all variables of a layout. The lender, if there is one, lends memory for the update."""

    clearable = False  # TensorFlow's own memory

    def __init__(self, layout: Layout, arrays: Sequence[Array],
                 lender: LendingAccumulator | None = None) -> None:
        super().__init__(layout)
        self._arrays, self._lender = arrays, lender
        self._written: list[Array] | None = None

    @property
    def written(self) -> list[Array]:
        """The arrays of the last update, in the lender's memory, or new; copies of the gradients if none was written.

        TensorFlow may write into what it gets, and others may still read the gradients.
        """
        return [each.copy() for each in self._arrays] if self._written is None else self._written

    def all_finite(self) -> bool:
        return all(bool(np.isfinite(each).all()) for each in self._arrays)

    def pieces(self) -> Iterator[Piece]:
        layout = self.layout
        for offset, array, (*_, dtype) in zip(layout.offsets[:-1], self._arrays, layout.entries, strict=True):
            flat = array.reshape(-1)
            if dtype == "bfloat16":  # NumPy has none: converted in parts, so that no copy of n is made
                for start in range(0, len(flat), 1 << 20):
                    yield int(offset) + start, flat[start:start + (1 << 20)].astype(np.float32)
            else:
                yield int(offset), flat

    def write(self, update: SparseVector | None, cleared: bool) -> None:  # noqa: ARG002
        layout = self.layout
        if update is None:
            self._written = [np.full(shape, np.nan, _numpy(dtype)) for _, shape, dtype in layout.entries]
            return
        lent = [None if self._lender is None else self._lender.lend(index) for index in range(len(layout.entries))]
        self._written = [_new(shape, _numpy(dtype)) if memory is None else memory
                         for memory, (_, shape, dtype) in zip(lent, layout.entries, strict=True)]
        for memory, part in zip(self._written, layout.parts(update), strict=True):
            scatter(memory.reshape(-1), part)


class OwnArrays(LocalGradients):
    """Gradients of some variables of a layout: the arrays of `inputs_of`. `finite` is True if all elements are."""

    def __init__(self, layout: Layout, form: Form, inputs: Sequence[Array], finite: bool) -> None:
        super().__init__(layout)
        self._finite, remaining = finite, iter(inputs)
        self._arrays = {part: (next(remaining).astype(np.int64) if is_sparse else None, next(remaining))
                        for part, is_sparse in form.items()}

    def elements_of(self, part: int, places: Indices) -> Values:
        if part not in self._arrays:
            return np.zeros(len(places))
        rows, values = self._arrays[part]
        if rows is not None:
            return elements_of_rows(rows, values, places)
        found: Values = values.reshape(-1)[places]
        return found

    def all_finite(self) -> bool:
        return self._finite


ALIGNMENT = 64
"""Bytes. TensorFlow shares memory that is aligned so, and copies any other."""


class LendingAccumulator(NumpyAccumulator):
    """A NumpyAccumulator that lends its spare buffer between a commit and the next accumulate.

    TensorFlow wants reduced gradients in memory of their own, n elements, just while the spare holds
    nothing. Whoever still holds a lent part when the next step begins may keep it: then the spare is new.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        lengths = np.diff(layout.offsets) * layout.dtype.itemsize
        self._starts = np.concatenate([[0], np.cumsum(-(-lengths // ALIGNMENT) * ALIGNMENT)]).tolist()
        super().__init__(layout.n, layout.dtype)

    def accumulate(self, pieces: Iterable[tuple[int, Array]], clear: bool = False) -> bool:
        if self._is_lent():
            with TensorFlowTransport.around():  # it lets go of what its kernels are done with when it converts
                tf.constant(np.zeros(1))
        if self._is_lent():
            self._acc = self._allocate()
        return super().accumulate(pieces, clear)

    def lend(self, index: int) -> Array | None:
        """Return memory for the index-th gradient, after a commit, for TensorFlow to take over; None for none."""
        _, shape, dtype = self._layout.entries[index]
        if _numpy(dtype) != self.dtype:
            return None
        return _array_in(self._acc.base, shape, self.dtype, self._starts[index])

    def _is_lent(self) -> bool:
        return sys.getrefcount(self._acc.base) > 2  # beside the spare itself, and the argument of this call

    def _allocate(self) -> Array:
        return _array_in(np.full(self._starts[-1] + ALIGNMENT, 0, np.uint8), (self.n,), self.dtype)


def _new(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return _array_in(np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8), shape, dtype)


def _array_in(owner: Any, shape: tuple[int, ...], dtype: Any, start: int = 0) -> Array:
    """Return an array in the owner's memory, so many bytes after its first aligned address."""
    return np.ndarray(shape, dtype, owner, -owner.ctypes.data % ALIGNMENT + start)
