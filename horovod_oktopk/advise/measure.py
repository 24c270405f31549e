"""Measurements of this machine, and of the network of a job, for the predictions."""

from __future__ import annotations

import statistics
import time

import numpy as np

from ..kernels import KERNELS
from ..selection.accumulator import NumpyAccumulator
from ..selection.local_top_k import local_top_k
from ..transport.base import Transport
from ..vectors.wire import WORD
from .model import Network

MEASURED_ELEMENTS = 1 << 22
"""Most elements that selection is measured on; it takes time in proportion."""
LARGE = 1 << 22
"""Bytes of the messages that bandwidth is measured with."""


def measure_selection(n: int, density: float) -> float:
    """Return the seconds of one step's passes over n elements on this core: accumulate, exact selection, write-back.

    The passes are those of an integration: the pass that accumulates clears the gradient, and the update is written
    over it.
    """
    m = min(n, MEASURED_ELEMENTS)
    k = max(1, round(density * m))
    accumulator, drawn = NumpyAccumulator(m), np.random.default_rng(0).standard_normal(m, np.float32)
    gradient, times = np.empty_like(drawn), []
    for _ in range(8):  # the first ones do not know yet what to expect
        np.copyto(gradient, drawn)
        start = time.perf_counter()
        accumulator.accumulate([(0, gradient)], clear=True)
        _, selection = local_top_k(accumulator, k)
        accumulator.commit(selection.indices)
        KERNELS.scatter(gradient, selection.indices, selection.values, zero=True)
        times.append(time.perf_counter() - start)
    return min(times[1:]) * n / m


def measure_network(transport: Transport, repeats: int = 20) -> Network:
    """Return α and β between neighbours, all sending at once. Collective.

    The slowest rank's figures count, so that every rank gets the same.
    """
    mine = [_ring_seconds(transport, length, repeats) for length in (WORD, LARGE)]
    short, long = (transport.allgather((1e9 * np.array(mine)).astype(np.int64)).max(axis=0) / 1e9).tolist()
    return Network(max(short, 1e-9), 8 * LARGE / max(long - short, 1e-9))


def _ring_seconds(transport: Transport, length: int, repeats: int) -> float:
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    message, times = np.zeros(length, np.uint8), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        list(transport.exchange({after: message}, {before: length}))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one sets up connections
