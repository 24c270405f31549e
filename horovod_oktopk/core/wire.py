"""A sparse vector as bytes, and back: all indices (uint32), then all values, in one message."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import WireError
from .sparse import SparseVector

Bytes = NDArray[np.uint8]

INDEX_BYTES = 4
MAX_ELEMENTS = 2**32
WORD = 4
"""Bytes of a word, the unit of the paper's volumes: an index or a float32 value is one."""


def element_bytes(dtype: Any) -> int:
    """Bytes that one element (index and value) takes on the wire."""
    return INDEX_BYTES + int(np.dtype(dtype).itemsize)


def encode(vector: SparseVector) -> Bytes:
    """The message for a vector: uint8, length m * element_bytes(dtype)."""
    message = np.empty(len(vector) * element_bytes(vector.values.dtype), np.uint8)
    split = len(vector) * INDEX_BYTES
    message[:split].view(np.uint32)[:] = vector.indices
    message[split:] = vector.values.view(np.uint8)
    return message


def decode(message: Bytes, dtype: Any, start: int, stop: int) -> SparseVector:
    """The vector in a message.

    start, stop: the region that all its indices must lie in.
    Raises WireError where the length does not fit, or an index is out of order or out of the region.
    """
    size = element_bytes(dtype)
    count, rest = divmod(len(message), size)
    if rest:
        raise WireError(f"a message of {len(message)} bytes does not hold whole elements of {size} bytes")
    split = count * INDEX_BYTES
    indices = message[:split].copy().view(np.uint32).astype(np.int64)  # copied, as a view would have to be aligned
    values = message[split:].copy().view(dtype)
    if count and not (start <= indices[0] and indices[-1] < stop and (np.diff(indices) > 0).all()):
        raise WireError(f"a message's {count} indices should ascend within [{start}, {stop}); "
                        f"they go from {indices[0]} to {indices[-1]}")
    return SparseVector(indices, values)
