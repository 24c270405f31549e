"""Ranks of an MPI communicator, through mpi4py. Import only where MPI runs already: under --gloo,
importing mpi4py would start a second MPI and abort the process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import TransportError
from .base import Bytes, Counts, Values, rotated_batches

TAG, SIGNAL = 1, 2
SPIN, NAP = 5e-5, 1e-4
"""Seconds for which a transport with yield_cpu looks for the end of what it waits for, and then between two looks."""
SHORTEST, LONGEST, SHARE = 5e-4, 1e-2, 0.005
"""Seconds between two looks for a signal, and of what share of the time since the last one in between: to wait inside
MPI would keep a core busy."""


class MPITransport:
    """An intra-communicator of our own, so that no message meets another library's.

    comm: an mpi4py communicator. Its error handler is set to raise, as mpi4py's default is.
    yield_cpu: waits without keeping a core busy, for a thread that runs beside one that computes.
    """

    def __init__(self, comm: Any, yield_cpu: bool = False) -> None:
        self.comm = comm
        self.yield_cpu = yield_cpu
        self.rank = int(comm.Get_rank())
        self.size = int(comm.Get_size())

    def signals(self) -> MPISignals:
        """Of the same ranks."""
        return MPISignals(self.comm)

    def abort(self) -> None:
        """Ends all processes of the job with an error."""
        self.comm.Abort(1)

    def allgather(self, row: Counts) -> Counts:
        rows = np.empty((self.size, len(row)), np.int64)
        with _errors():
            self._call("allgather", np.ascontiguousarray(row), rows)
        return rows

    def allreduce(self, values: Values) -> Values:
        total = np.empty_like(values)
        with _errors():
            self._call("allreduce", np.ascontiguousarray(values), total)
        return total

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 messages_in_flight: int) -> Iterator[list[tuple[int, Bytes]]]:
        flying: tuple[list[Any], list[tuple[int, Bytes]]] | None = None
        with _errors():
            for batch in rotated_batches(self.rank, self.size, messages_in_flight):
                posted = self._post(batch, outgoing, incoming)
                if flying is not None:  # the next batch is under way while the caller sums this one
                    self._wait(flying[0])
                    yield flying[1]
                flying = posted
            if flying is not None:
                self._wait(flying[0])
                yield flying[1]

    def _call(self, collective: str, *buffers: Any) -> None:
        if self.yield_cpu:
            self._wait([getattr(self.comm, f"I{collective}")(*buffers)])
        else:
            getattr(self.comm, collective.capitalize())(*buffers)

    def _wait(self, requests: list[Any]) -> None:
        if not self.yield_cpu:
            MPI.Request.Waitall(requests)
            return
        start = time.monotonic()
        while not MPI.Request.Testall(requests):
            if time.monotonic() > start + SPIN:
                time.sleep(NAP)

    def _post(self, batch: list[tuple[int, int]], outgoing: Mapping[int, Bytes],
              incoming: Mapping[int, int]) -> tuple[list[Any], list[tuple[int, Bytes]]]:
        arrivals = [(source, np.empty(incoming[source], np.uint8)) for _, source in batch if source in incoming]
        requests = [self.comm.Irecv([buffer, MPI.BYTE], source, TAG) for source, buffer in arrivals]
        requests += [self.comm.Isend([outgoing[to], MPI.BYTE], to, TAG) for to, _ in batch if to in outgoing]
        return requests, arrivals

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        gathered = np.empty(int(sizes.sum()), np.uint8)
        with _errors():
            self._call("allgatherv", [message, MPI.BYTE], [gathered, sizes, MPI.BYTE])
        return np.split(gathered, np.cumsum(sizes)[:-1])


class MPISignals:
    """Signals beside what a transport of the same communicator carries; MPI must run with MPI_THREAD_MULTIPLE."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._rank = int(comm.Get_rank())
        self._own: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._flying: list[tuple[Any, Counts]] = []
        self._last = time.monotonic()

    def send(self, to: int, number: int) -> None:
        if to == self._rank:
            self._own.put(number)
            return
        buffer = np.array([number], np.int64)
        with _errors(), self._lock:
            self._flying = [(request, kept) for request, kept in self._flying if not request.Test()]
            self._flying.append((self._comm.Isend([buffer, MPI.INT64_T], to, SIGNAL), buffer))

    def receive(self, timeout: float) -> int | None:
        start = time.monotonic()
        while True:
            if not self._own.empty():
                self._last = time.monotonic()
                return self._own.get()
            with _errors():
                if self._comm.Iprobe(MPI.ANY_SOURCE, SIGNAL):
                    buffer = np.empty(1, np.int64)
                    self._comm.Recv([buffer, MPI.INT64_T], MPI.ANY_SOURCE, SIGNAL)
                    self._last = time.monotonic()
                    return int(buffer[0])
            now = time.monotonic()
            if now > start + timeout:
                return None
            time.sleep(min(max(SHORTEST, SHARE * (now - self._last)), LONGEST))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise TransportError(f"MPI failed: {error}") from error
