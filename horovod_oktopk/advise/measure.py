"""Measurements of this machine, and of the network of a job; or a network as users write it, with units."""

from __future__ import annotations

import re
import statistics
import time

import numpy as np

from ..errors import OptionError
from ..kernels import KERNELS
from ..selection.accumulator import NumpyAccumulator
from ..selection.local_top_k import local_top_k
from ..transport.base import Transport
from ..vectors.wire import WORD
from .model import Network

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Return the bits per second of, say, 10gbit, 940mbit/s or 25Gbps.

    Raise OptionError for any other text, also without a unit or in bytes.
    """
    found = re.fullmatch(r"([0-9.eE+]+?)\s*([kmgtKMGT]?)(?:(?i:bit(?:/s)?)|b(?:/s|ps))", text.strip())
    return _positive(text, found and found[1], PREFIXES[found[2].lower()] if found else 1.0,
                     "a bandwidth in bits with its unit, such as 10gbit, 940mbit/s or 25Gbps")


def parse_latency(text: str) -> float:
    """Return the seconds of, say, 50us, 0.1ms or 5e-5s. Raise OptionError for any other text, also without a unit."""
    found = re.fullmatch(r"([0-9.eE+-]+?)\s*(s|ms|us|ns)", text.strip().lower())
    return _positive(text, found and found[1], SECONDS[found[2]] if found else 1.0,
                     "a latency with its unit, such as 50us, 0.1ms or 1e-6s")


def _positive(text: str, number: str | None, unit: float, what: str) -> float:
    try:
        value = float(number or "") * unit
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"expected {what}; got {text!r}")
    return value


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
