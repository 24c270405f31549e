"""The cost model: words, messages and seconds of a step of every scheme, on hosts of one or several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log2

import numpy as np

from ..errors import OptionError
from ..phases.sparse_transport import MESSAGES_IN_FLIGHT
from ..schemes import cost
from ..schemes.oktopk import OkTopk
from ..transport.base import batch_length
from ..vectors.wire import WORD, WireCodec

HIERARCHICAL = "OkTopk, hierarchical"
OVERHEAD = 2e-6
"""Seconds of the processor for each message, through mpi4py over TCP."""
SUM_COPIES = 2.5
"""What a word costs that one rank of a host hands another to be added: so many copies of it in memory. It is written
into memory that both see, cleared where it was, read, and added. With 2, 4 and 8 ranks it was 2.5, 2.4 and 2.4."""


@dataclass(frozen=True)
class Network:
    """latency: α, seconds for a message. bandwidth: bits in a second, of one host, in each direction."""

    latency: float
    bandwidth: float

    def transfer(self, words: float) -> float:
        """Seconds."""
        return words * WORD * 8 / self.bandwidth


@dataclass(frozen=True)
class Host:
    """ranks: L, which share the host's link. memory: bytes that they copy in a second, all together."""

    ranks: int = 1
    memory: float = float("inf")


ALONE = Host()


@dataclass(frozen=True)
class Prediction:
    """One scheme's step. words: on the link of the host that sends or receives most, in one direction: those of
    Table 1, with coded indices. transfer, latency, sparsification: seconds."""

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


def predict(n: int, size: int, density: float, network: Network, selection_seconds: float,
            global_density: float | None = None, host: Host = ALONE) -> list[Prediction]:
    """Every scheme's step, dense first; words of Table 1 (Li and Hoefler, 2022), of an interval the upper end.

    selection_seconds: what accumulating, selecting and writing back n elements takes.
    global_density: OkTopk's.
    host: all have as many ranks, in the order of hosts, which share their host's link. What a rank sends goes to all
        others alike, but for dense (a ring, on each link once) and GTopk's tree (once for each level that leaves the
        host). Where each host is one worker (HIERARCHICAL), it sends what one rank would, and its ranks add up their
        gradients in memory. Messages on a host are taken to have no latency.
    TopkDSA's fill-in is that of ranks which select independently of one another: the worst case.
    Raises OptionError where global_density is not in (0, 1], or `size` ranks do not fill hosts.
    """
    hosts = hosts_of(size, host.ranks)
    options = OkTopk(density=density, global_density=global_density)
    k = options.k_of(n)
    rounds = _levels(size)
    filled = n * (1 - (1 - k / n) ** size)
    share = (size - 1) / size
    coded = WireCodec(np.dtype(np.float32)).size(k, n) / (2 * WORD * k)  # an element's words on the wire, to two
    dsa = (2 * k * coded + min(2 * filled * coded, n)) * share
    leaving = host.ranks * (size - host.ranks) / max(size - 1, 1)  # of what one rank sends, on its host's link
    tree = _levels(size) - floor(log2(host.ranks))

    def oktopk(workers: int) -> float:
        return coded * cost.oktopk_bound(k, workers, options.global_k_of(k, n, workers))

    def of_rounds(count: int) -> float:
        return network.latency * count

    table = [("dense", cost.dense_volume(n, size), of_rounds(2 * rounds), 0.0),
             ("OkTopk", leaving * oktopk(size), oktopk_latency(size, size, network), selection_seconds)]
    if host.ranks > 1:
        table += [(HIERARCHICAL, oktopk(hosts), oktopk_latency(size, hosts, network),
                   selection_seconds / host.ranks + host_sum_seconds(n, host))]
    table += [("TopkA", leaving * coded * cost.topka_volume(k, size), of_rounds(rounds), selection_seconds),
              ("TopkDSA", leaving * dsa, _exchange_latency(size, network) + of_rounds(2 * rounds), selection_seconds),
              ("GTopk", coded * 4 * k * tree, of_rounds(2 * rounds), selection_seconds),
              ("GaussianK", leaving * coded * cost.topka_volume(k, size), of_rounds(2 * rounds), selection_seconds)]
    return [Prediction(scheme, words, network.transfer(words), latency if size > 1 else 0.0, sparsification)
            for scheme, words, latency, sparsification in table]


def hosts_of(size: int, ranks_per_host: int) -> int:
    """How many hosts so many ranks are on. Raises OptionError where they do not fill them, or fill but one."""
    if size % ranks_per_host:
        raise OptionError(f"{size} ranks do not fill hosts of {ranks_per_host}: --ranks must be a multiple of "
                          "--ranks-per-host")
    if size == ranks_per_host > 1:
        raise OptionError(f"{size} ranks on one host send nothing over its link: --ranks must be at least twice "
                          "--ranks-per-host")
    return size // ranks_per_host


def host_sum_seconds(n: int, host: Host) -> float:
    """What it takes the ranks of a host to add up n elements each: all but its own share goes through memory."""
    return SUM_COPIES * (host.ranks - 1) * n * WORD / host.memory


def oktopk_latency(size: int, workers: int, network: Network) -> float:
    """Seconds. Three collectives, the roll call and the search for the global threshold, are among all ranks; among
    one rank of each worker are the exchange of phase 1, and the allgather of the update. Where a worker is a host,
    its counts are another; elsewhere they come with the roll call. Each tells each, and so pays for each message."""
    across = 1 if workers == size else 2
    return (_exchange_latency(workers, network) + OVERHEAD * (workers - 1)
            + network.latency * (3 * _levels(size) + across * _levels(workers)))


def _exchange_latency(size: int, network: Network) -> float:
    """Of a message to each rank, of which several fly at once."""
    batches = ceil((size - 1) / batch_length(size, MESSAGES_IN_FLIGHT))
    return network.latency * batches + OVERHEAD * (size - 1)


def _levels(size: int) -> int:
    """Of a tree of so many ranks."""
    return ceil(log2(size))
