"""`python -m horovod_oktopk advise`: what each scheme would cost on a network, and whether dense wins."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np

from .errors import OptionError
from .schemes import cost
from .schemes.oktopk import OkTopk
from .selection.accumulator import NumpyAccumulator
from .selection.local_top_k import local_top_k
from .timing import median_seconds, slowest
from .transport.base import Transport
from .vectors.wire import WORD, WireCodec

MEASURED_ELEMENTS = 1 << 22
"""Selection is measured on at most so many elements; it takes time in proportion."""
LARGE = 1 << 22
"""Bytes of the messages that bandwidth is measured with."""
BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Network:
    """latency: α, seconds for a message. bandwidth: bits in a second, of one rank, in each direction."""

    latency: float
    bandwidth: float

    def transfer(self, words: float) -> float:
        """Seconds."""
        return words * WORD * 8 / self.bandwidth


@dataclass(frozen=True)
class Prediction:
    """One scheme's step. words: those of Table 1, with coded indices. transfer, latency, sparsification: seconds."""

    scheme: str
    words: float
    transfer: float
    latency: float
    sparsification: float

    @property
    def communication(self) -> float:
        return self.transfer + self.latency

    @property
    def seconds(self) -> float:
        return self.communication + self.sparsification


def parse_bandwidth(text: str) -> float:
    """Bits per second of, say, 10gbit, 940mbit/s or 1e9bps. Raises OptionError, without a unit too."""
    found = re.fullmatch(r"([0-9.eE+]+?)\s*([kmgt]?)(?:bit(?:/s)?|bps)", text.strip().lower())
    return _positive(text, found and found[1], BITS[found[2]] if found else 1.0,
                     "a bandwidth in bits with its unit, such as 10gbit, 940mbit/s or 25Gbps")


def parse_latency(text: str) -> float:
    """Seconds of, say, 50us, 0.1ms or 5e-5s. Raises OptionError, without a unit too."""
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


def predict(n: int, size: int, density: float, network: Network, selection_seconds: float,
            global_density: float | None = None) -> list[Prediction]:
    """Every scheme's step, dense first; costs of Table 1 (Li and Hoefler, 2022), of an interval the upper end.

    selection_seconds: what accumulating, selecting and writing back n elements takes.
    global_density: OkTopk's; it raises OptionError where it is not in (0, 1].
    TopkDSA's fill-in is that of ranks which select independently of one another: the worst case.
    """
    options = OkTopk(density=density, global_density=global_density)
    k = options.k_of(n)
    rounds = float(np.ceil(np.log2(size))) if size > 1 else 0.0
    filled = n * (1 - (1 - k / n) ** size)
    share = (size - 1) / size
    coded = WireCodec(np.dtype(np.float32)).size(k, n) / (2 * WORD * k)  # an element's words on the wire, to two
    dsa = (2 * k * coded + min(2 * filled * coded, n)) * share
    table = [("dense", cost.dense_volume(n, size), 2 * rounds),
             ("OkTopk", coded * cost.oktopk_bound(k, size, options.global_k_of(k, n, size)), 2 * size + 2 * rounds),
             ("TopkA", coded * cost.topka_volume(k, size), rounds),
             ("TopkDSA", dsa, size + 2 * rounds),
             ("GTopk", coded * cost.gtopk_volume(k, size), 2 * rounds),
             ("GaussianK", coded * cost.topka_volume(k, size), 2 * rounds)]
    return [Prediction(scheme, words, network.transfer(words), network.latency * messages if size > 1 else 0.0,
                       0.0 if scheme == "dense" else selection_seconds) for scheme, words, messages in table]


def measure_selection(n: int, density: float) -> float:
    """Seconds that one step's passes over n elements take on this core: accumulate, exact selection, write-back."""
    m = min(n, MEASURED_ELEMENTS)
    k = max(1, round(density * m))
    accumulator = NumpyAccumulator(m)
    gradient = np.random.default_rng(0).standard_normal(m, np.float32)
    times = []
    for _ in range(8):  # the first ones do not know yet what to expect
        start = time.perf_counter()
        accumulator.accumulate([(0, gradient)])
        _, selection = local_top_k(accumulator, k)
        accumulator.commit(selection.indices)
        output = np.zeros(m, np.float32)
        output[selection.indices] = selection.values
        times.append(time.perf_counter() - start)
    return min(times[1:]) * n / m


def measure_network(transport: Transport, repeats: int = 20) -> Network:
    """α and β between neighbours, all sending at once; called on all ranks together.

    The slowest rank's figures count, so that every rank gets the same.
    """
    short, long = slowest([_ring_seconds(transport, length, repeats) for length in (WORD, LARGE)], transport)
    return Network(max(short, 1e-9), 8 * LARGE / max(long - short, 1e-9))


def _ring_seconds(transport: Transport, length: int, repeats: int) -> float:
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    message = np.zeros(length, np.uint8)
    return median_seconds(lambda: list(transport.exchange({after: message}, {before: length}, 1)), repeats)


def report(n: int, size: int, density: float, network: Network, selection_seconds: float,
           global_density: float | None = None) -> str:
    """The table, and the verdict; see `predict`."""
    predictions = predict(n, size, density, network, selection_seconds, global_density)
    dense, best = predictions[0], min(predictions[1:], key=lambda p: p.seconds)
    lines = [f"{n:,} parameters, {size} ranks, density {density:g}; {network.bandwidth / 1e9:g} Gbit/s, "
             f"{1e6 * network.latency:g} us; a step of all ranks, predicted:", "",
             f"{'scheme':<10} {'moved by a rank':>15} {'communication':>15} {'sparsification':>15} {'together':>12}"]
    lines += [f"{p.scheme:<10} {p.words * WORD / 1e6:>12.2f} MB {1e3 * p.communication:>12.2f} ms "
              f"{1e3 * p.sparsification:>12.2f} ms {1e3 * p.seconds:>9.2f} ms" for p in predictions]
    return "\n".join([*lines, "", _verdict(dense, best)])


def _verdict(dense: Prediction, best: Prediction) -> str:
    if best.seconds >= dense.seconds:
        return (f"Dense wins: it takes {1e3 * dense.seconds:.2f} ms, the best sparse scheme ({best.scheme}) "
                f"{1e3 * best.seconds:.2f} ms. Do not compress here.")
    overhead = best.sparsification + best.latency - dense.latency
    crossing = (dense.words - best.words) * WORD * 8 / overhead / 1e9 if overhead > 0 else float("inf")
    return (f"{best.scheme} is {dense.seconds / best.seconds:.1f} times faster than dense; dense wins from about "
            f"{crossing:.3g} Gbit/s on. Horovod hides part of a dense allreduce behind the backward pass, and sparse "
            "updates are not the dense ones: compare both in a training run of your own.")
