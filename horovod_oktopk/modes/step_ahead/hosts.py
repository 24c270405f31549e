"""The ranks of a host that is one worker: each reads its share of w - p, and all are to have the same p."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schemes.algorithm import Algorithm
from ...selection.parameter_accumulator import ParameterAccumulator, Pieces, Replica, clipped
from ...transport.counting import CountingTransport, Hosts

SAME_ON_HOST = ("one of the parameters, which all ranks of a host must change alike with hierarchical (change "
                "gradients after optimizer.synchronize() only, and call hvd.broadcast_optimizer_state)")
PUT_TOGETHER = ("the state was saved with other hosts: what the ranks of this host had not sent was combined. They "
                "take the same steps now, so make their optimizer state (momentum, moments) the same: "
                "call hvd.broadcast_optimizer_state(optimizer, root_rank=0)")
ROUNDING = 1e-3
"""Largest difference between parameters of the ranks of a host, relative to the largest; saving them rounds."""
SAMPLES = 64
"""Number of parameters that are compared on a host before each exchange."""


class HostMember:
    """One rank of a worker. accumulator: w - p of all elements."""

    def __init__(self, accumulator: ParameterAccumulator) -> None:
        self.copies = 1
        """Number of consecutive ranks that have this rank's residual w - p."""
        self._accumulator = accumulator
        self._share: tuple[int, ParameterAccumulator] | None = None  # where it begins, and w - p there

    def share_of(self, pieces: Pieces, hosts: Hosts | None) -> tuple[ParameterAccumulator, Pieces]:
        """Return the accumulator and parameters that this rank reads: all; or its share, if a host is one worker."""
        if hosts is None:
            return self._accumulator, pieces
        place, bounds = hosts.within.rank, hosts.bounds(self._accumulator.n).tolist()
        start, stop = bounds[place:place + 2]
        if self._share is None or (self._share[0], self._share[1].n) != (start, stop - start):
            self._share = start, self._accumulator.part(start, stop)
        return self._share[1], clipped(pieces, start, stop)

    def check_alike(self, pieces: Pieces, algorithm: Algorithm, k: int, transport: CountingTransport) -> None:
        """Compare samples of p on the host. Raise AgreementError on the ranks of all hosts if samples differ."""
        if transport.hosts is None:
            return
        mine = samples_of(pieces, algorithm.step)
        with transport.phase("host_agree"):
            rows = transport.hosts.within.allgather(mine.view(np.int64)).view(np.float64)
        tolerance = ROUNDING * np.abs(rows).max(initial=0, where=np.isfinite(rows))
        differ = (np.abs(rows - rows[0]) > tolerance).any(axis=0)  # what is not finite is the roll call's concern
        if differ.any():
            said = f"{SAME_ON_HOST}: {mine[np.argmax(differ)]:.6g}\n{algorithm.description}"
            algorithm.agree_on_host(k, transport, said)

    def become_alike(self, replica: Replica, hosts: Hosts, adds: bool, was_loaded: bool) -> None:
        """Give the ranks of a host one residual: that of all of them, if a state of another shape was loaded.

        adds: True if residuals are added up, and not averaged. Collective on the host.
        """
        size, within = hosts.within.size, hosts.within
        if not within.allgather(np.array([was_loaded], np.int64)).any():
            return
        residual = self._residual(replica)
        mine = np.array([self.copies, zlib.crc32(np.ascontiguousarray(residual).view(np.uint8).data)])
        copies, digests = within.allgather(mine).T
        self.copies = size
        if (copies == size).all() if adds else (digests == digests[0]).all():
            return
        warnings.warn(PUT_TOGETHER, stacklevel=2)
        residual = within.allreduce(residual / residual.dtype.type(mine[0] if adds else size))
        replica.assign(self._accumulator.minus(residual))

    def _residual(self, replica: Replica) -> NDArray[Any]:
        self._accumulator.accumulate(replica.pieces())
        residual = self._accumulator.values()
        self._accumulator.release()
        return residual


def samples_of(pieces: Pieces, number: int) -> NDArray[np.float64]:
    """Return some of the parameters, from all over, others at each number: shape (SAMPLES,), padded with zeros."""
    each = max(1, SAMPLES // max(1, len(pieces)))
    found: list[float] = []
    for _, piece in _every(pieces, SAMPLES, number):
        found += _every(piece, each, number).tolist()
    return np.array([*found, *[0.0] * SAMPLES][:SAMPLES])


def _every(items: Any, most: int, number: int) -> Any:
    """Return at most `most` items at equal distances; the number shifts the first of them."""
    step = max(1, -(-len(items) // most))
    return items[number % step::step]
