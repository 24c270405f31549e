"""`python -m horovod_oktopk advise`: what dense and the recommended schemes add to a step on a network."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from .errors import OptionError
from .kernels import KERNELS
from .phases import volume
from .schemes.algorithm import Memory
from .schemes.oktopk import OkTopk
from .schemes.options import DENSITIES, Unit
from .schemes.sameblocks import SameBlocks
from .schemes.turns import Turns
from .selection.accumulator import NumpyAccumulator
from .selection.local_top_k import local_top_k
from .selection.parameter_accumulator import NumpyParameterAccumulator
from .transport.base import WORD, Transport, batch_length
from .vectors.sparse import Values
from .vectors.wire import WORD_BITS, WireCodec, blocks_of

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MEASURED_ELEMENTS = 1 << 22
"""Most elements that selection is measured on; it takes time in proportion."""
LARGE = 1 << 22
"""Bytes of the messages that bandwidth is measured with."""
BUSY = ("the network could not be measured: {large} MiB took {long:.2f} ms between ranks, and {word} bytes took "
        "{short:.2f} ms, as the machines are busy, or ranks share cores: start one rank on each host and measure "
        "again, or give --ranks, --bandwidth and --latency")
OVERHEAD = 2e-6
"""Seconds of the processor for each message, through mpi4py over TCP."""
ACCURACY = """\
Accuracy, measured at density 1 %, of SameBlocks at 20 %:
dense: the reference.
OkTopk: loses accuracy. On 4 ranks an LSTM's loss was 23 % above dense's after as many steps, with a tuned rate.
StepAhead(OkTopk): close to dense on few ranks. On 4 the LSTM's loss was 1.8 % above dense's, with nothing tuned, on
16 ranks 4.6 %. On 4 ranks a GPT reached dense's loss in 1.14 times dense's steps.
StepAhead(SameBlocks): closer, and sends equally much on any number of ranks. The LSTM's loss was 0.5 % above dense's
on 4 ranks, and 1.8 % on 16; with AdamW a transformer's 0.9 % on 4, 1.8 % on 8, 5.1 % on 16. With overlap=False,
which makes each step wait for its exchange: the LSTM 0.3 % on 16, the transformer 1.2 % on 8, 2.5 % on 16.
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
    k, accumulator = max(1, round(density * m)), NumpyAccumulator(m)

    def step(gradient: Values) -> None:
        accumulator.accumulate([(0, gradient)], clear=True)
        _, selection = local_top_k(accumulator, k)
        accumulator.commit(selection.indices)
        KERNELS.scatter(gradient, selection.indices, selection.values, zero=True)

    return _least_seconds(step, m) * n / m


def measure_blocks(n: int) -> float:
    """Return the seconds of what a step of StepAhead(SameBlocks) cannot hide: read w - p, take blocks, move p."""
    m, scheme = min(n, MEASURED_ELEMENTS), SameBlocks()
    k, algorithm, accumulator = scheme.k_of(m), scheme.algorithm("parameters"), NumpyParameterAccumulator(m)
    count = blocks_of(m)
    turns = Turns(np.random.default_rng(1).random(count, np.float32), np.ones(count, np.uint16))  # scattered

    def step(own: Values) -> None:
        accumulator.accumulate([(0, own)])
        blocks = algorithm.select(accumulator, k, Memory(turns=turns)).elements
        accumulator.release()
        accumulator.commit(blocks)
        blocks.add_to(own)

    accumulator.start([(0, np.zeros(m, np.float32))])
    return _least_seconds(step, m) * n / m


def _least_seconds(step: Callable[[Values], None], m: int) -> float:
    """Return the least of eight steps' seconds, each with the same m random numbers, which it may overwrite."""
    drawn, times = np.random.default_rng(0).standard_normal(m, np.float32), []
    for _ in range(8):  # the first ones do not know yet what to expect
        given = drawn.copy()
        start = time.perf_counter()
        step(given)
        times.append(time.perf_counter() - start)
    return min(times)


def measure_network(transport: Transport, repeats: int = 20) -> Network:
    """Return α and β of the slowest rank, on every rank; between neighbours, all sending at once. Collective.

    Raise OptionError if long messages take no longer than short ones: what was measured then is not the network.
    """
    mine = [_ring_seconds(transport, length, repeats) for length in (WORD, LARGE)]
    short, long = (transport.allgather((1e9 * np.array(mine)).astype(np.int64)).max(axis=0) / 1e9).tolist()
    if long <= short:
        raise OptionError(BUSY.format(large=LARGE >> 20, long=1e3 * long, word=WORD, short=1e3 * short))
    return Network(max(short, 1e-9), 8 * LARGE / (long - short))


def _ring_seconds(transport: Transport, length: int, repeats: int) -> float:
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    message, times = np.zeros(length, np.uint8), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        list(transport.send_and_receive({after: message}, {before: length}))
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first one sets up connections, and a busy machine makes others long


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


def predict(n: int, size: int, options: OkTopk, network: Network, selection_seconds: float,
            blocks_seconds: float) -> list[Prediction]:
    """Predict dense, OkTopk, and StepAhead with OkTopk and with SameBlocks. No exchange is assumed to be hidden here.

    Words are those of Table 1 (Li and Hoefler, 2022), at the upper end of an interval; SameBlocks has values alone.
    The selection includes accumulating and writing back n elements.

    Messages are those of collectives, in which each rank tells each (the roll call, the allgather of the update, and
    in OkTopk two for the global threshold, or one if all sums are kept), and of phase 1: one to each rank, of which
    several fly at once.
    """
    def predicted(scheme: str, words: float, collectives: int, seconds: float) -> Prediction:
        rounds = ceil((size - 1) / batch_length(size)) + collectives * ceil(log2(size))
        latency = network.latency * rounds + 2 * OVERHEAD * (size - 1)
        return Prediction(scheme, words, latency, seconds, network.bandwidth)

    def oktopk(scheme: str, unit: Unit) -> Prediction:
        k = options.k_of(n)
        keeps_all = options.global_k_of(k, n, size, unit) == min(n, k * size)
        return predicted(scheme, _oktopk_words(n, size, options, unit), 3 if keeps_all else 4, selection_seconds)

    return [predict_dense(n, size, network), oktopk("OkTopk", "gradients"), oktopk("StepAhead(OkTopk)", "parameters"),
            predicted("StepAhead(SameBlocks)", _blocks_words(n, size), 2, blocks_seconds)]


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


def _blocks_words(n: int, size: int) -> float:
    """Return the words of SameBlocks at its own density: values, and no index."""
    scheme = SameBlocks()
    codec, k = WireCodec(np.dtype(np.float32), scheme.algorithm("parameters").value_dtype), scheme.k_of(n)
    return volume.dense_volume(codec.size(k, k) / WORD, size)


def report(n: int, size: int, options: OkTopk, network: Network, selection_seconds: float,
           blocks_seconds: float) -> str:
    """Return the table, the verdict and the known accuracy, as text; see `predict`."""
    predictions = predict(n, size, options, network, selection_seconds, blocks_seconds)
    dense, _, ahead, blocks = predictions
    lines = [f"{n:,} parameters, {size} ranks, density {options.present_density:g}, of SameBlocks "
             f"{SameBlocks().present_density:g}; {network.bandwidth / 1e9:g} Gbit/s, {1e6 * network.latency:g} us; "
             "what a step needs beside computing, predicted:", "",
             f"{'scheme':<22} {'sent, at most':>16} {'communication':>15} {'sparsification':>15} {'together':>12}"]
    lines += [f"{p.scheme:<22} {p.words * WORD / 1e6:>13.2f} MB {1e3 * p.communication:>12.2f} ms "
              f"{1e3 * p.sparsification:>12.2f} ms {1e3 * p.seconds:>9.2f} ms" for p in predictions]
    hidden = ("Over MPI and torchrun StepAhead's communication is hidden behind the next step, if computing that "
              f"takes at least {1e3 * ahead.communication:.2f} ms with OkTopk: then {1e3 * ahead.sparsification:.2f} "
              f"ms remain; with SameBlocks {1e3 * blocks.communication:.2f} and "
              f"{1e3 * blocks.sparsification:.2f} ms.")
    more = _at_higher_densities(n, size, options, network)
    return "\n".join([*lines, "", _verdict(dense, [ahead, blocks]), hidden, *more, "", ACCURACY])


def _at_higher_densities(n: int, size: int, options: OkTopk, network: Network) -> list[str]:
    """Return a line on the seconds of StepAhead(OkTopk)'s communication if more is sent; none if all is."""
    found = [(density, predict(n, size, options.with_density(density), network, 0.0, 0.0)[2].communication)
             for density in (*DENSITIES[::4], 1.0) if density > options.present_density]
    words = ", ".join(f"{1e3 * seconds:.2f} ms at {100 * density:g} %" for density, seconds in found)
    return [f'If OkTopk sends more, it takes {words}: density="auto" finds what costs no time.'] if found else []


def _verdict(dense: Prediction, ahead: list[Prediction]) -> str:
    """Compare StepAhead, the recommended mode, with dense: in seconds, as a ratio would leave computing out."""
    best = min(ahead, key=lambda p: p.seconds)
    if best.seconds >= dense.seconds:
        return (f"Dense wins: it takes {1e3 * dense.seconds:.2f} ms, the best mode ({best.scheme}) "
                f"{1e3 * best.seconds:.2f} ms. Do not compress here.")
    return (f"{best.scheme} needs {1e3 * best.seconds:.2f} ms beside computing, and dense {1e3 * dense.seconds:.2f} "
            "ms: add what your step computes to both. Dense needs less where Horovod or DDP hides a part of it in "
            "the backward pass, and StepAhead more where ranks share cores. Sparse updates are not the dense ones: "
            "compare both in a run of your own.")
