"""A worker of a reduction: a rank by itself, or a host whose ranks hold a slice each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import AgreementError
from ..phases.agreement import Attendance, roll_call
from ..schemes.algorithm import Algorithm
from ..selection.accumulator import Pieces, between
from ..selection.parameter_accumulator import ParameterAccumulator
from ..transport.base import Transport
from ..transport.connect import Connection
from ..transport.counting import CountingTransport
from ..vectors.sparse import SparseVector
from .algorithm import OnHosts
from .hosts import Hosts, hosts_of

SAME_ON_HOST = ("one of the parameters, which all ranks of a host must change alike with hierarchical (change "
                "gradients after optimizer.synchronize() only, and call broadcast_optimizer_state)")
ROUNDING = 1e-3
"""Largest difference between parameters of the ranks of a host, relative to the largest; saving them rounds."""
SAMPLES = 64
"""Number of parameters that are compared on a host before each exchange."""


class Worker:
    """A rank that is a worker by itself."""

    hosts: Hosts | None = None
    """The hosts, if each of them is a worker."""
    within: Transport | None = None
    """To the other ranks of this worker, if there are any."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def agree(self, said: Attendance) -> bool:
        """Compare the ranks of this worker before they send each other anything.

        Workers may still differ, which the step's roll call finds. Return True if all ranks of the worker are finite.
        Raise AgreementError, on the ranks of all workers.
        """
        return said.finite

    def part(self, acc: ParameterAccumulator, pieces: Pieces) -> tuple[ParameterAccumulator, Pieces]:
        """Return the accumulator of the elements that this rank holds, and the pieces of these."""
        return acc, pieces

    def check_alike(self, pieces: Pieces, said: Attendance) -> None:
        """Compare samples of the parameters. Raise AgreementError on all ranks if they differ within a worker."""

    def gather(self, own: SparseVector, n: int) -> SparseVector:  # noqa: ARG002
        """Return the worker's vector of n elements; every rank gives the elements that it holds."""
        return own

    def own(self, vector: Any, n: int) -> Any:  # noqa: ARG002
        """Return the elements of the worker's vector that this rank holds."""
        return vector


class HostWorker(Worker):
    """A host whose ranks hold a slice each. All methods but `part` and `own` are collective on it."""

    def __init__(self, algorithm: Algorithm, hosts: Hosts, everyone: CountingTransport) -> None:
        super().__init__(OnHosts(algorithm, hosts))
        self.hosts: Hosts = hosts
        self.within: Transport = hosts.within
        self._everyone = everyone
        self._part: tuple[slice, ParameterAccumulator] | None = None

    def agree(self, said: Attendance) -> bool:
        try:
            with self.hosts.within.phase("host_agree"):
                return roll_call(said, self.hosts.within).finite
        except AgreementError:
            roll_call(said, self._everyone)  # the others are there, or will be
            raise

    def part(self, acc: ParameterAccumulator, pieces: Pieces) -> tuple[ParameterAccumulator, Pieces]:
        own = self.hosts.slice_of(acc.n)
        if self._part is None or self._part[0] != own:
            self._part = own, acc.part(own.start, own.stop)
        return self._part[1], list(between(pieces, own.start, own.stop))

    def check_alike(self, pieces: Pieces, said: Attendance) -> None:
        mine = _samples_of(pieces, said.step)
        with self.hosts.within.phase("host_agree"):
            rows = self.hosts.within.allgather(mine.view(np.int64)).view(np.float64)
        tolerance = ROUNDING * np.abs(rows).max(initial=0, where=np.isfinite(rows))
        with np.errstate(invalid="ignore"):  # what is not finite is the roll call's concern
            differ = (np.abs(rows - rows[0]) > tolerance).any(axis=0)
        if differ.any():
            found = f"{said.description}\n{SAME_ON_HOST}: {mine[np.argmax(differ)]:.6g}"
            self.agree(replace(said, description=found))

    def gather(self, own: SparseVector, n: int) -> SparseVector:
        return self.hosts.gather(own, n)

    def own(self, vector: SparseVector, n: int) -> SparseVector:
        own = self.hosts.slice_of(n)
        part = slice(*np.searchsorted(vector.indices, [own.start, own.stop]).tolist())
        return SparseVector(vector.indices[part] - own.start, vector.values[part])


def worker_of(algorithm: Algorithm, connection: Connection) -> Worker:
    """Return the worker that this rank belongs to. Collective."""
    hosts = hosts_of(connection)
    return Worker(algorithm) if hosts is None else HostWorker(algorithm, hosts, connection.transport)


def _samples_of(pieces: Pieces, number: int) -> NDArray[np.float64]:
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
