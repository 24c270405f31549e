"""The flat vector of all gradients: where each one lies in it, and how an update is written over it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..kernels import KERNELS
from .sparse import SparseVector

DTYPES = ("float16", "bfloat16", "float32", "float64")
OVERFLOWS = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": np.inf}
"""The least float32 magnitudes that become infinite in these dtypes."""
MAX_ELEMENTS = 2**32
"""Limit on the elements of a vector: on the wire a word could not tell more of them apart."""


class Layout:
    """The flat view over gradients, in the given order.

    The entries are the name, shape and dtype's name of each. There are n elements in all. The offsets are int64,
    shape (number of gradients + 1,). The dtype is the residual's: float64 if any gradient is, float32 otherwise.
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

    def digest(self) -> str:
        """Return a text that differs if one bit of the parameters does; "" if ranks may meet with different ones."""
        return ""

    def representable(self, update: SparseVector) -> bool:
        """Return True if every value is finite in the dtype of its gradient; float16 overflows early."""
        if not np.isfinite(update.values).all():
            return False
        own, dtypes = self.dtype.name, [dtype for *_, dtype in self.entries]
        if {*dtypes} <= {own}:
            return True
        with np.errstate(over="ignore"):
            return all((np.abs(part.values.astype(np.float32)) < OVERFLOWS[dtype]).all()
                       for part, dtype in zip(self.parts(update), dtypes, strict=True) if dtype != own)

    def parts(self, update: SparseVector) -> Iterator[SparseVector]:
        """Yield the update's part of each gradient; indices from the gradient's own start."""
        for offset, part in zip(self.offsets.tolist(), self.cut(update), strict=False):
            yield part.shifted(-offset)

    def cut(self, update: SparseVector) -> Iterator[SparseVector]:
        """Yield the update's part of each gradient, with the update's own indices."""
        for start, stop in itertools.pairwise(update.numbers_below(self.offsets).tolist()):
            yield update[start:stop]


def scatter(out: NDArray[Any], part: SparseVector, zero: bool = False) -> None:
    """Write a gradient's part of the update over the gradient, flat and contiguous, in its dtype.

    `zero` tells that the gradient is zero already, if its dtype is the update's.
    """
    if out.dtype == part.values.dtype:
        KERNELS.scatter(out, part.indices, part.values, zero)
    else:
        out.fill(0)
        out[part.indices] = part.values
