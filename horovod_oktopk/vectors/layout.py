"""The place of every parameter's gradient in the one flat vector: the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..kernels import KERNELS
from .sparse import DenseVector, SparseVector
from .wire import MAX_ELEMENTS

L = TypeVar("L", bound="Layout")
DTYPES = ("float16", "bfloat16", "float32", "float64")


class Layout:
    """The flat view over gradients, in the given order.

    entries: name, shape and dtype's name of each.
    n: elements in all. offsets: int64, shape (number of gradients + 1,). dtype: the residual's: float64 if
    any gradient is, float32 otherwise.
    Raise OptionError for a dtype other than DTYPES, and for too many elements.
    """

    def __init__(self, entries: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
        self.entries = tuple(entries)
        lengths = [int(np.prod(shape, dtype=np.int64)) for _, shape, _ in self.entries]
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.n = int(self.offsets[-1])
        self.dtype = np.dtype(np.float64 if any(dtype == "float64" for _, _, dtype in self.entries) else np.float32)
        for name, _, dtype in self.entries:
            if dtype not in DTYPES:
                raise OptionError(f"the gradient of '{name}' must be one of {DTYPES}; got {dtype}")
        if self.n >= MAX_ELEMENTS:
            raise OptionError(f"at most {MAX_ELEMENTS - 1} gradient elements can be reduced at once; got {self.n}: "
                              "divide the parameters among several optimizers")

    def describe(self) -> list[str]:
        """Return one line for each gradient, which must be equal on all ranks."""
        return [f"parameter {name}: shape {shape}, {dtype}" for name, shape, dtype in self.entries]

    def describe_memory(self) -> list[str]:
        """Return one line for each parameter, as `describe`, with the order in which its elements lie in memory."""
        return self.describe()

    def summary(self, k: int) -> str:
        """Return the number of elements, tensors and selected elements, for the log."""
        return f"n = {self.n:,} in {len(self.entries)} tensors, k = {k:,}"

    def representable(self, update: SparseVector | DenseVector) -> bool:
        """Return True if every value is finite in the dtype of its gradient; float16 overflows early."""
        if not np.isfinite(update.values).all():
            return False
        own, dtypes = self.dtype.name, [dtype for *_, dtype in self.entries]
        return {*dtypes} <= {own} or all(self._fits(part.values, dtype) for part, dtype
                                         in zip(self.parts(update), dtypes, strict=True) if dtype != own)

    def _fits(self, _values: NDArray[Any], _dtype: str) -> bool:
        """Return True if finite values stay finite in a narrower dtype."""
        return True

    def parts(self, update: SparseVector | DenseVector) -> Iterator[SparseVector]:
        """Yield the update's part of each gradient; indices from the gradient's own start."""
        for offset, part in zip(self.offsets[:-1], update.split(self.offsets), strict=True):
            yield SparseVector(part.indices - offset, part.values)


def scatter(out: NDArray[Any], part: SparseVector, zero: bool = False) -> None:
    """Write a gradient's part of the update over the gradient, flat and contiguous, in its dtype.

    zero: True if the gradient is zero already, if its dtype is the update's.
    """
    if out.dtype == part.values.dtype:
        KERNELS.scatter(out, part.indices, part.values, zero)
    else:
        out.fill(0)
        out[part.indices] = part.values
