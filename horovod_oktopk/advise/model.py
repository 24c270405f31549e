"""The cost model: words, messages and seconds of a step of dense, OkTopk and StepAhead(OkTopk); and its report."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from ..phases import exchange
from ..schemes.base import Unit
from ..schemes.oktopk import OkTopk
from ..transport.base import batch_length
from ..vectors.wire import WORD, WireCodec

OVERHEAD = 2e-6
"""Seconds of the processor for each message, through mpi4py over TCP."""


@dataclass(frozen=True)
class Network:
    """A network. latency: α, seconds for a message. bandwidth: bits per second of one rank, in each direction."""

    latency: float
    bandwidth: float

    def transfer(self, words: float) -> float:
        """Return the seconds that these words take."""
        return words * WORD * 8 / self.bandwidth


@dataclass(frozen=True)
class Prediction:
    """One scheme's step. words: sent by a rank, as coded. transfer, latency, sparsification: seconds."""

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


def predict(n: int, size: int, options: OkTopk, network: Network, selection_seconds: float) -> list[Prediction]:
    """Predict dense, OkTopk and StepAhead(OkTopk), whose exchange is not assumed to be hidden here.

    Words are those of Table 1 (Li and Hoefler, 2022), at the upper end of an interval.
    selection_seconds: of accumulating, selecting and writing back n elements.
    """
    latency = _oktopk_latency(size, network)
    table: list[tuple[str, Unit]] = [("OkTopk", "gradients"), ("StepAhead(OkTopk)", "parameters")]
    return [predict_dense(n, size, network)] + [
        Prediction(scheme, words := _oktopk_words(n, size, options, unit), network.transfer(words), latency,
                   selection_seconds) for scheme, unit in table]


def predict_dense(n: int, size: int, network: Network) -> Prediction:
    """Predict a dense allreduce, with the words of a ring and the messages of trees."""
    words = exchange.dense_volume(n, size)
    return Prediction("dense", words, network.transfer(words), 2 * network.latency * _levels(size), 0.0)


def _oktopk_words(n: int, size: int, options: OkTopk, unit: Unit) -> float:
    """Return the bound in words after encoding.

    The paper's bound counts two words (index, value) for each element. The codec needs fewer, so k is scaled down.
    """
    codec, k = WireCodec(np.dtype(np.float32), options.wire_dtype(unit)), options.k_of(n)
    counts = k, options.global_k_of(k, n, size, unit)
    selected, kept = (codec.size(count, n) / (2 * WORD) for count in counts)
    return exchange.oktopk_bound(selected, size, kept)


def _oktopk_latency(size: int, network: Network) -> float:
    """Return the seconds of a step's messages.

    There are four collectives, in which each rank tells each: the roll call, two for the global threshold, and the
    allgather of the update; and the exchange of phase 1, a message to each rank, of which several fly at once.
    """
    batches = ceil((size - 1) / batch_length(size))
    return network.latency * (batches + 4 * _levels(size)) + 2 * OVERHEAD * (size - 1)


def _levels(size: int) -> int:
    """Return the levels of a tree of `size` ranks."""
    return ceil(log2(size))


ACCURACY = """\
Accuracy, measured at density 1 %:
dense: the reference.
OkTopk: loses accuracy. On 4 ranks an LSTM's loss was 23 % above dense's after as many steps, with a tuned rate.
StepAhead(OkTopk): close to dense on few ranks. On 4 the LSTM's loss was 1.8 % above dense's, with nothing tuned, on
16 ranks 5.6 %. On 4 ranks a GPT reached dense's loss in 1.14 times dense's steps.
See docs/guides/accuracy.md and docs/benchmarks.md."""
"""Effects on accuracy, which the predicted seconds do not show."""


def report(n: int, size: int, options: OkTopk, network: Network, selection_seconds: float) -> str:
    """Return the table, the verdict and the known accuracy, as text; see `predict`."""
    dense, *sparse = predict(n, size, options, network, selection_seconds)
    width, ahead = len(sparse[-1].scheme), sparse[-1]
    lines = [f"{n:,} parameters, {size} ranks, density {options.density:g}; {network.bandwidth / 1e9:g} Gbit/s, "
             f"{1e6 * network.latency:g} us; a step of all ranks, predicted:", "",
             f"{'scheme':<{width}} {'sent, at most':>16} {'communication':>15} {'sparsification':>15} "
             f"{'together':>12}"]
    lines += [f"{p.scheme:<{width}} {p.words * WORD / 1e6:>13.2f} MB {1e3 * p.communication:>12.2f} ms "
              f"{1e3 * p.sparsification:>12.2f} ms {1e3 * p.seconds:>9.2f} ms" for p in (dense, *sparse)]
    hidden = (f"Over MPI StepAhead's communication is hidden behind the next step, if computing that takes at least "
              f"{1e3 * ahead.communication:.2f} ms: then {1e3 * ahead.sparsification:.2f} ms remain of it.")
    return "\n".join([*lines, "", _verdict(dense, sparse), hidden, "", ACCURACY])


def _verdict(dense: Prediction, sparse: list[Prediction]) -> str:
    best = min(sparse, key=lambda p: p.seconds)
    if best.seconds >= dense.seconds:
        return (f"Dense wins: it takes {1e3 * dense.seconds:.2f} ms, the best sparse scheme ({best.scheme}) "
                f"{1e3 * best.seconds:.2f} ms. Do not compress here.")
    crossing = max(_crossing(dense, p) for p in sparse)
    return (f"{best.scheme} is {dense.seconds / best.seconds:.1f} times faster than dense; dense wins from about "
            f"{crossing:.3g} Gbit/s on. Horovod hides part of a dense allreduce behind the backward pass, and sparse "
            "updates are not the dense ones: compare both in a training run of your own.")


def _crossing(dense: Prediction, scheme: Prediction) -> float:
    """Return the Gbit/s from which on dense is faster."""
    overhead = scheme.sparsification + scheme.latency - dense.latency
    return (dense.words - scheme.words) * WORD * 8 / overhead / 1e9 if overhead > 0 else float("inf")
