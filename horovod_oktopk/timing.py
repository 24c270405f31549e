"""How long things take, and that all ranks agree on it: for the trials that choose what is fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .transport.base import Counts, Transport

WARM_UP, SAMPLES = 3, 5
"""Steps with a candidate before it is timed, and steps that are."""
LONGEST = 1e6
"""Seconds; what takes longer, or infinitely long, counts as this."""

Seconds = NDArray[np.float64]


def to_nanoseconds(seconds: ArrayLike) -> Counts:
    """Seconds as they travel, in rows of integers."""
    return (1e9 * np.minimum(seconds, LONGEST)).astype(np.int64)


def from_nanoseconds(nanoseconds: Counts) -> Seconds:
    """The seconds."""
    return nanoseconds / 1e9


def seconds_of_ranks(mine: Sequence[float], transport: Transport) -> Seconds:
    """All ranks' seconds: shape (P, m), equal on all of them."""
    return from_nanoseconds(transport.allgather(to_nanoseconds(mine)))


def slowest(mine: Sequence[float], transport: Transport) -> list[float]:
    """Of each entry the longest of all ranks."""
    return seconds_of_ranks(mine, transport).max(axis=0).tolist()  # type: ignore[no-any-return]


def median_seconds(action: Callable[[], object], samples: int = SAMPLES, before: Callable[[], object] = lambda: None,
                   ) -> float:
    """The median of what an action takes, after one that is not timed. before: what comes before each, untimed."""
    seconds = []
    for _ in range(1 + samples):
        before()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
