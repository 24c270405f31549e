"""Memory that is mapped already, for the temporaries of a step."""

from __future__ import annotations

from functools import cache

import numpy as np

LARGEST = (1 << 25) - (1 << 16)
"""Bytes: glibc adapts to freed blocks of up to 32 MiB."""


@cache
def keep_freed_memory() -> None:
    """Make glibc keep up to 64 MiB of freed memory for the next allocation; once in a process.

    glibc gives freed memory back to the system at once, until it has seen a larger block freed (mallopt(3),
    M_MMAP_THRESHOLD). A step allocates and frees some megabytes: each time the system would map them anew, page by
    page. The block that shows glibc the size is never written to, so it costs nothing. Thresholds that were set by
    hand stay.
    """
    np.empty(LARGEST, np.uint8)
