"""Values in 16 bits. The rounding error is exact in the values' own dtype, so a residual can keep it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

HalfDtype = Literal["float16", "bfloat16"]
HalfBits = NDArray[np.uint16]
"""Numbers of either format, as bits."""

FLOAT16_LIMIT = 2.0**15
"""Number sent for any magnitude above float16's largest; a power of two, so that the rounding error is exact."""


def to_half(values: NDArray[Any], name: HalfDtype) -> HalfBits:
    """Return the nearest numbers of 16 bits, ties to even, as bits: uint16, shape of values.

    values: float32 or float64, finite.
    """
    limit = np.finfo(np.float32).max
    singles = values.clip(-limit, limit).astype(np.float32, copy=False)
    if name == "float16":
        with np.errstate(over="ignore"):
            halves = singles.astype(np.float16)
        over = np.isinf(halves)
        halves[over] = np.copysign(FLOAT16_LIMIT, halves[over])
        return halves.view(np.uint16)
    bits = np.ascontiguousarray(singles).view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(nearest & 0x7FFF == 0x7F80, bits >> 16, nearest).astype(np.uint16)  # not up to infinity


def from_half(bits: HalfBits, name: HalfDtype, dtype: Any) -> NDArray[Any]:
    """Return the numbers that these bits stand for, in another dtype."""
    numbers = bits.view(np.float16) if name == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return numbers.astype(dtype)
