"""The cost model: words, messages and seconds of a step of dense, OkTopk and StepAhead(OkTopk)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from ..schemes import cost
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
    words = cost.dense_volume(n, size)
    return Prediction("dense", words, network.transfer(words), 2 * network.latency * _levels(size), 0.0)


def _oktopk_words(n: int, size: int, options: OkTopk, unit: Unit) -> float:
    """Return the bound in words after encoding.

    The paper's bound counts two words (index, value) for each element. The codec needs fewer, so k is scaled down.
    """
    codec, k = WireCodec(np.dtype(np.float32), options.wire_dtype(unit)), options.k_of(n)
    counts = k, options.global_k_of(k, n, size, unit)
    selected, kept = (codec.size(count, n) / (2 * WORD) for count in counts)
    return cost.oktopk_bound(selected, size, kept)


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
