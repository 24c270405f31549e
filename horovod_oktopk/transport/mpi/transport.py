"""Ranks of an MPI communicator, through mpi4py.

Import only where MPI runs already: under --gloo, importing mpi4py would start a second MPI and abort the process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import TransportError
from ..base import (
    CHUNK,
    DIRECT_RANKS,
    MESSAGES_IN_FLIGHT,
    WORD,
    Bytes,
    Counts,
    Signals,
    Transport,
    Values,
    alltoall_rounds,
    rotated_batches,
)
from .gate import Gate

logger = logging.getLogger("horovod_oktopk")

TAG, SIGNAL, CONTROL, WAKE = 1, 2, 3, 4
SPIN, NAP = 5e-5, 1e-4
"""Seconds for which a transport with yield_cpu polls without a pause, and then between two polls."""
SHORTEST, LONGEST, FRACTION = 5e-4, 1e-2, 0.005
"""Seconds between two looks for a signal, at least and at most, and the fraction of the time since the last signal.

Waiting inside MPI would keep a core busy.
"""


class MPITransport(Transport):
    """An intra-communicator of our own, so that no message meets another library's.

    `comm` is an mpi4py communicator. Its error handler is set to raise, as mpi4py's default is.
    `yield_cpu` waits without keeping a core busy, for a thread that runs beside one that computes.
    `channel` tells the transport from others of the same ranks.
    `allgather`, `alltoall` and `send_and_receive`, in which ranks may wait for one another, wait for requests, and
    can be woken. Within a step all ranks are there. So `allreduce` and `allgatherv` are MPI's own, which cannot be.
    """

    concurrent = True
    direct_ranks, messages_in_flight = DIRECT_RANKS, MESSAGES_IN_FLIGHT

    def __init__(self, comm: Any, yield_cpu: bool = False, channel: int = 0) -> None:
        self.comm = comm
        self.channel = channel
        self.yield_cpu = yield_cpu
        self.rank = int(comm.Get_rank())
        self.size = int(comm.Get_size())
        self.gate = Gate()
        self.control = Control(comm)
        self._woken = comm.Irecv([np.empty(1, np.uint8), MPI.BYTE], self.rank, WAKE)
        self._hears_waking, self._was_woken = True, False
        self._abandoned: list[Any] = []  # MPI may still write into their buffers

    def signals(self) -> MPISignals:
        return MPISignals(self.comm, self.gate)

    def abort(self) -> None:
        self.comm.Abort(1)

    def wake(self) -> None:
        """Make this rank's wait raise the gate's reason, as the awaited message will not come. For the watchdog."""
        if not self._hears_waking:
            logger.critical("in the middle of a step: %s. This rank ends the job", self.gate.reason)
            self.abort()
        elif not self._was_woken:
            self._was_woken = True
            self.comm.Send([np.zeros(1, np.uint8), MPI.BYTE], self.rank, WAKE)

    def close(self) -> None:
        """End what is under way of this transport. For the watchdog, once the gate is quiet."""
        self.control.finish()
        if self._woken:
            self._woken.Cancel()
            self._woken.Wait()

    def allgather(self, row: Counts) -> Counts:
        """Gather by dissemination, in ⌈log₂ P⌉ rounds (Bruck et al., 1997)."""
        rows = np.empty((self.size, len(row)), np.int64)
        rows[0] = row
        known = 1  # block i is that of the i-th rank after this one
        with _errors(), self.gate.operation(), self.gate.inside():
            while known < self.size:
                count = min(known, self.size - known)
                self._wait([self.comm.Irecv(rows[known:known + count], (self.rank + known) % self.size, TAG),
                            self.comm.Isend(rows[:count], (self.rank - known) % self.size, TAG)])
                known += count
        return np.roll(rows, self.rank, axis=0)

    def alltoall(self, rows: Counts) -> Counts:
        """Exchange in one or two rounds of messages, see alltoall_rounds: MPI's own may send each row in many."""
        places = (self.rank + np.arange(self.size)) % self.size
        blocks = rows[places]
        with _errors(), self.gate.operation(), self.gate.inside():
            for messages in alltoall_rounds(self.size, self.direct_ranks):
                arrivals = [np.empty((len(moved), rows.shape[1]), np.int64) for _, moved in messages]
                requests = [self.comm.Irecv(arrival, (self.rank - distance) % self.size, TAG)
                            for (distance, _), arrival in zip(messages, arrivals, strict=True)]
                requests += [self.comm.Isend(blocks[moved], (self.rank + distance) % self.size, TAG)
                             for distance, moved in messages]
                self._wait(requests)
                for (_, moved), arrival in zip(messages, arrivals, strict=True):
                    blocks[moved] = arrival
        arrived: Counts = blocks[(self.rank - np.arange(self.size)) % self.size]
        return arrived

    def allreduce(self, values: Values) -> Values:
        total, given = np.empty_like(values), np.ascontiguousarray(values).reshape(-1)
        with _errors(), self.gate.operation(), self.gate.inside():
            for start in range(0, max(1, len(given)), CHUNK):
                self._call("allreduce", given[start:start + CHUNK], total.reshape(-1)[start:start + CHUNK])
        return total

    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        posted: list[Any] = []
        flying = (self._post(batch, outgoing, incoming, posted)
                  for batch in rotated_batches(self.rank, self.size, self.messages_in_flight))
        try:
            with self.gate.operation():
                # In pairs, so that the next batch is under way while the caller sums the one before.
                for (requests, arrivals), _ in pairwise(chain(flying, [([], [])])):
                    with _errors(), self.gate.inside():
                        self._wait(requests)
                    yield arrivals
        finally:  # also where the caller leaves: MPI may still write into these, or read from them
            self._abandoned += [request for request in posted if request]

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        gathered = np.empty(int(sizes.sum()), np.uint8)
        unit, kind = (1, MPI.BYTE) if (sizes % WORD).any() else (WORD, MPI.UINT32_T)  # MPI counts them in 32 bits
        with _errors(), self.gate.operation(), self.gate.inside():
            self._call("allgatherv", [message, kind], [gathered, sizes // unit, kind])
        return np.split(gathered, np.cumsum(sizes)[:-1])

    def _call(self, collective: str, *buffers: Any) -> None:
        if self.yield_cpu:
            self._wait([getattr(self.comm, f"I{collective}")(*buffers)])
            return
        self._hears_waking = False
        try:
            getattr(self.comm, collective.capitalize())(*buffers)
        finally:
            self._hears_waking = True

    def _wait(self, requests: list[Any]) -> None:
        """Wait until all requests are complete. Raise TransportError if this rank is woken before.

        After any error, the requests under way keep their memory. They are not cancelled: then the next receive would
        take a message that was meant for them.
        """
        pending = [*requests, self._woken]
        try:
            if self.yield_cpu:
                self._look_until_complete(pending)
            else:
                while any(pending[:-1]) and pending[-1]:
                    MPI.Request.Waitsome(pending)
        finally:
            self._abandoned += [request for request in requests if request]
        if any(pending[:-1]):
            self.gate.check()

    def _look_until_complete(self, pending: list[Any]) -> None:
        """Look until all but the last are complete, or the last, which wakes this rank; sleep in between."""
        start = time.monotonic()
        while any(pending[:-1]) and pending[-1] and MPI.Request.Testsome(pending) is not None:
            if any(pending[:-1]) and pending[-1] and time.monotonic() > start + SPIN:
                time.sleep(NAP)

    def _post(self, batch: list[tuple[int, int]], outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
              posted: list[Any]) -> tuple[list[Any], list[tuple[int, Bytes]]]:
        """Begin a batch; `posted` gets every request as soon as there is one, as the next may fail."""
        arrivals = [(source, np.empty(incoming[source], np.uint8)) for _, source in batch if source in incoming]
        with _errors(), self.gate.inside():
            before = len(posted)
            for source, buffer in arrivals:
                posted.append(self.comm.Irecv([buffer, MPI.UINT32_T], source, TAG))
            for to, _ in batch:
                if to in outgoing:
                    posted.append(self.comm.Isend([outgoing[to], MPI.UINT32_T], to, TAG))
        return posted[before:], arrivals


class Control:
    """Small objects that ranks of a communicator send each other unasked, under a tag of their own.

    One thread at a time sends, and one receives.
    """

    def __init__(self, comm: Any, tag: int = CONTROL) -> None:
        self._comm, self._tag = comm, tag
        self._flying: list[Any] = []

    def send(self, to: int, message: Any) -> None:
        """Send without waiting."""
        self._flying = [request for request in self._flying if not request.test()[0]]
        self._flying.append(self._comm.isend(message, to, self._tag))

    def receive(self) -> Iterator[tuple[int, Any]]:
        """Yield (source, message) of all messages that have come."""
        status = MPI.Status()
        while (found := self._comm.improbe(MPI.ANY_SOURCE, self._tag, status)) is not None:
            yield status.Get_source(), found.recv()

    def finish(self) -> None:
        """Wait until all sent messages are complete."""
        MPI.Request.Waitall(self._flying)


class MPISignals(Signals):
    """Signals beside what a transport of the same communicator carries; MPI must run with MPI_THREAD_MULTIPLE."""

    def __init__(self, comm: Any, gate: Gate) -> None:
        self._control = Control(comm, SIGNAL)
        self._gate = gate
        self._rank = int(comm.Get_rank())
        self._own: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def send(self, to: int, number: int) -> None:
        if to == self._rank:
            self._own.put(number)
            return
        with _errors(), self._gate.moment(), self._lock:
            self._control.send(to, number)

    def receive(self, timeout: float) -> int | None:
        start = time.monotonic()
        while True:
            if not self._own.empty():
                self._last = time.monotonic()
                return self._own.get()
            with _errors(), self._gate.moment():
                found = next(self._control.receive(), None)
            if found is not None:
                self._last = time.monotonic()
                return int(found[1])
            now = time.monotonic()
            if now > start + timeout:
                return None
            time.sleep(min(max(SHORTEST, FRACTION * (now - self._last)), LONGEST))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise TransportError(f"MPI failed: {error}. Look for the first error of any rank in the output") from error
