"""`python -m horovod_oktopk advise`: what dense, OkTopk and StepAhead(OkTopk) add to a step on a network."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np

from .errors import OptionError
from .kernels import KERNELS
from .phases import volume
from .schemes.oktopk_options import OkTopk
from .schemes.options import DENSITIES, Unit
from .selection.accumulator import NumpyAccumulator
from .selection.local_top_k import local_top_k
from .transport.base import Transport, batch_length
from .vectors.wire import WORD, WORD_BITS, WireCodec

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MEASURED_ELEMENTS = 1 << 22
"""Most elements that selection is measured on; it takes time in proportion."""
LARGE = 1 << 22
"""Bytes of the messages that bandwidth is measured with."""
OVERHEAD = 2e-6
"""Seconds of the processor for each message, through mpi4py over TCP."""
ACCURACY = """\
Accuracy, measured at density 1 %:
dense: the reference.
OkTopk: loses accuracy. On 4 ranks an LSTM's loss was 23 % above dense's after as many steps, with a tuned rate.
StepAhead(OkTopk): close to dense on few ranks. On 4 the LSTM's loss was 1.8 % above dense's, with nothing tuned, on
16 ranks 5.6 %. On 4 ranks a GPT reached dense's loss in 1.14 times dense's steps.
See docs/guides/accuracy.md and docs/benchmarks.md."""
"""Effects on accuracy, which the predicted seconds do not show."""


@dataclass(frozen=True)
class Network:
    """A network. Its latency α is in seconds a message, its bandwidth in bits per second of a rank, each way."""

    latency: float
    bandwidth: float


def parse_bandwidth(text: str) -> float:
    """Return the bits per second of, say, 10gbit, 940mbit/s or 25Gbps. Raise OptionError, also for bytes."""
    return _parse(text, r"([kmgtKMGT]?)(?:(?i:bit(?:/s)?)|b(?:/s|ps))", PREFIXES,
                  "a bandwidth in bits with its unit, such as 10gbit, 940mbit/s or 25Gbps")


def parse_latency(text: str) -> float:
    """Return the seconds of, say, 50us, 0.1ms or 5e-5s. Raise OptionError for any other text, also without a unit."""
    return _parse(text, "(?i:(s|ms|us|ns))", SECONDS, "a latency with its unit, such as 50us, 0.1ms or 1e-6s")


def _parse(text: str, unit: str, factors: Mapping[str, float], expected: str) -> float:
    found = re.fullmatch(rf"([0-9.eE+-]+?)\s*{unit}", text.strip())
    try:
        value = float(found[1]) * factors[found[2].lower()] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"expected {expected}; got {text!r}")
    return value


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
    return min(times) * n / m


def measure_network(transport: Transport, repeats: int = 20) -> Network:
    """Return α and β of the slowest rank, on every rank; between neighbours, all sending at once. Collective."""
    mine = [_ring_seconds(transport, length, repeats) for length in (WORD, LARGE)]
    short, long = (transport.allgather((1e9 * np.array(mine)).astype(np.int64)).max(axis=0) / 1e9).tolist()
    return Network(max(short, 1e-9), 8 * LARGE / max(long - short, 1e-9))


def _ring_seconds(transport: Transport, length: int, repeats: int) -> float:
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    message, times = np.zeros(length, np.uint8), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        list(transport.send_and_receive({after: message}, {before: length}))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one sets up connections


@dataclass(frozen=True)
class Prediction:
    """One scheme's step. A rank sends the words, as coded. Times are in seconds, the bandwidth is in bits/s."""

    scheme: str
    words: float
    latency: float
    sparsification: float
    bandwidth: float

    @property
    def communication(self) -> float:
        return self.words * WORD_BITS / self.bandwidth + self.latency

    @property
    def seconds(self) -> float:
        return self.communication + self.sparsification


def predict(n: int, size: int, options: OkTopk, network: Network, selection_seconds: float) -> list[Prediction]:
    """Predict dense, OkTopk and StepAhead(OkTopk), whose exchange is not assumed to be hidden here.

    Words are those of Table 1 (Li and Hoefler, 2022), at the upper end of an interval.
    The selection includes accumulating and writing back n elements.

    Messages are those of four collectives, in which each rank tells each (the roll call, two for the global
    threshold, the allgather of the update), and of phase 1: one to each rank, of which several fly at once.
    """
    rounds = ceil((size - 1) / batch_length(size)) + 4 * ceil(log2(size))
    latency = network.latency * rounds + 2 * OVERHEAD * (size - 1)
    table: list[tuple[str, Unit]] = [("OkTopk", "gradients"), ("StepAhead(OkTopk)", "parameters")]
    return [predict_dense(n, size, network)] + [
        Prediction(scheme, _oktopk_words(n, size, options, unit), latency, selection_seconds, network.bandwidth)
        for scheme, unit in table]


def predict_dense(n: int, size: int, network: Network) -> Prediction:
    """Predict a dense allreduce, with the words of a ring and the messages of trees."""
    latency = 2 * network.latency * ceil(log2(size))
    return Prediction("dense", volume.dense_volume(n, size), latency, 0.0, network.bandwidth)


def _oktopk_words(n: int, size: int, options: OkTopk, unit: Unit) -> float:
    """Return the bound in words after encoding.

    The paper's bound counts two words (index, value) for each element. The codec needs fewer, so k is scaled down.
    """
    codec, k = WireCodec(np.dtype(np.float32), options.wire_dtype(unit)), options.k_of(n)
    counts = k, options.global_k_of(k, n, size, unit)
    selected, kept = (codec.size(count, n) / (2 * WORD) for count in counts)
    return volume.oktopk_bound(selected, size, kept)


def report(n: int, size: int, options: OkTopk, network: Network, selection_seconds: float) -> str:
    """Return the table, the verdict and the known accuracy, as text; see `predict`."""
    predictions = predict(n, size, options, network, selection_seconds)
    dense, *sparse = predictions
    ahead = sparse[-1]
    lines = [f"{n:,} parameters, {size} ranks, density {options.present_density:g}; "
             f"{network.bandwidth / 1e9:g} Gbit/s, {1e6 * network.latency:g} us; "
             "what a step needs beside computing, predicted:", "",
             f"{'scheme':<17} {'sent, at most':>16} {'communication':>15} {'sparsification':>15} {'together':>12}"]
    lines += [f"{p.scheme:<17} {p.words * WORD / 1e6:>13.2f} MB {1e3 * p.communication:>12.2f} ms "
              f"{1e3 * p.sparsification:>12.2f} ms {1e3 * p.seconds:>9.2f} ms" for p in predictions]
    least, left = 1e3 * ahead.communication, 1e3 * ahead.sparsification
    hidden = ("Over MPI and torchrun StepAhead's communication is hidden behind the next step, if computing that "
              f"takes at least {least:.2f} ms: then {left:.2f} ms remain of it.")
    return "\n".join([*lines, "", _verdict(dense, sparse), hidden, *_at_higher_densities(n, size, options, network),
                      "", ACCURACY])


def _at_higher_densities(n: int, size: int, options: OkTopk, network: Network) -> list[str]:
    """Return a line on the seconds that StepAhead's communication takes if more is sent; none if all is."""
    found = [(density, predict(n, size, replace(options, density=density), network, 0.0)[-1].communication)
             for density in (*DENSITIES[::4], 1.0) if density > options.present_density]
    words = ", ".join(f"{1e3 * seconds:.2f} ms at {100 * density:g} %" for density, seconds in found)
    return [f'If more is sent, it takes {words}: density="auto" finds what costs no time.'] if found else []


def _verdict(dense: Prediction, sparse: list[Prediction]) -> str:
    best = min(sparse, key=lambda p: p.seconds)
    if best.seconds >= dense.seconds:
        return (f"Dense wins: it takes {1e3 * dense.seconds:.2f} ms, the best sparse scheme ({best.scheme}) "
                f"{1e3 * best.seconds:.2f} ms. Do not compress here.")
    crossing = max(_crossing(dense, p) for p in sparse)
    return (f"{best.scheme} is {dense.seconds / best.seconds:.1f} times faster than dense; dense wins from about "
            f"{crossing:.3g} Gbit/s on. Horovod and DDP hide part of a dense allreduce behind the backward pass, and "
            "sparse updates are not the dense ones: compare both in a training run of your own.")


def _crossing(dense: Prediction, scheme: Prediction) -> float:
    overhead = scheme.sparsification + scheme.latency - dense.latency
    return (dense.words - scheme.words) * WORD_BITS / overhead / 1e9 if overhead > 0 else float("inf")
