"""The flat vector's parts as NumPy arrays that TensorFlow shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_oktopk.modes.mode import Update
from horovod_oktopk.vectors.layout import Layout, scatter

Array = NDArray[Any]


class TensorLayout(Layout):
    """The flat view over dense gradients."""

    def pieces(self, gradients: Sequence[Array]) -> Iterator[tuple[int, Array]]:
        """Yield the gradients as (offset, flat array)."""
        for offset, gradient, (_, _, dtype) in zip(self.offsets[:-1], gradients, self.entries, strict=True):
            flat = gradient.reshape(-1)
            if dtype == "bfloat16":  # NumPy has none: converted in parts, so that no copy of n is made
                for start in range(0, len(flat), 1 << 20):
                    yield int(offset) + start, flat[start:start + (1 << 20)].astype(np.float32)
            else:
                yield int(offset), flat

    def _fits(self, values: Array, dtype: str) -> bool:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(values.astype(_numpy(dtype)).astype(np.float64)).all())

    def write(self, update: Update | None, memory_for: Callable[[int], Array]) -> list[Array]:
        """Return the update as dense arrays, in memory_for(index); all NaN if there is none."""
        if update is None:
            return [np.full(shape, np.nan, _numpy(dtype)) for _, shape, dtype in self.entries]
        outputs = []
        for index, part in enumerate(self.parts(update)):
            out = memory_for(index)
            scatter(out.reshape(-1), part)
            outputs.append(out)
        return outputs


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
