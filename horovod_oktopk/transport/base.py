"""The network as algorithms see it: bytes and ranks."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]
Values = NDArray[Any]
MESSAGES_IN_FLIGHT = 8
"""Messages of an exchange in flight at once, while those before them are decoded; more among many ranks."""
MOST_BATCHES = 8
"""The most batches that an exchange sends its messages in."""
DIRECT_RANKS = 64
"""Ranks up to which an alltoall sends directly; see alltoall_rounds. A message costs about 2 µs: among more ranks
a second round costs less.
"""
WORD = 4
"""Bytes of a word, the unit of the paper's volumes: an index or a float32 value is one. Messages are whole words."""
CHUNK = 1 << 28
"""Most bytes, or elements of an allreduce, that are sent at once: MPI counts in 32 bits."""


class Transport(ABC):
    """Blocking communication among `size` ranks. All ranks call the same methods in the same order.

    Every method raises TransportError if another rank failed or does not answer.
    """

    rank: int
    size: int
    concurrent: bool
    """True if calls may run on a thread of their own, beside whatever else this process sends."""

    @abstractmethod
    def allgather(self, row: Counts) -> Counts:
        """Return all ranks' short rows: int64, shape (P, m). The row is int64, of the same shape (m,) on each."""

    @abstractmethod
    def allreduce(self, values: Values) -> Values:
        """Return the element-wise sum of arrays of the same shape and dtype on every rank; all get the same bits."""

    @abstractmethod
    def alltoall(self, rows: Counts) -> Counts:
        """Send a short row to each rank; return the rows for this rank, by source.

        The rows are int64, of the same shape (P, m) on every rank.
        """

    @abstractmethod
    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        """Send messages point to point, in batches; yield a batch's (source, message) pairs as it arrives.

        `outgoing` holds messages (uint8) by destination, `incoming` numbers of bytes by source, each a multiple of 4.
        Neither holds this rank, nor empty messages. A transport may use a single batch. The caller must exhaust the
        iterator.
        """

    @abstractmethod
    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        """Return the messages (uint8) of all ranks, in rank order. All ranks know their sizes, in bytes."""

    def signals(self) -> Signals | None:
        """Return signals to the same ranks; None if this transport has none."""
        return None

    def abort(self) -> None:
        """End all processes of the job with an error, where the transport can."""


class Signals(ABC):
    """Numbers that ranks send each other unasked, from any thread, beside what a Transport carries."""

    @abstractmethod
    def send(self, to: int, number: int) -> None:
        """Send a number of 64 bits to another rank, or to this one, without waiting."""

    @abstractmethod
    def receive(self, timeout: float) -> int | None:
        """Return the next number, from any rank; None if none came within `timeout` seconds. Called by one thread."""


@functools.lru_cache(maxsize=16)
def alltoall_rounds(size: int, direct_ranks: int = DIRECT_RANKS) -> tuple[tuple[tuple[int, Counts], ...], ...]:
    """Return the rounds of an alltoall; a round lists its messages as (distance to the destination rank, blocks).

    Block d is on its way to the d-th rank after its source, by the digits of d (Bruck et al., 1997). Up to
    direct_ranks ranks there is one digit, and a message to each rank. Among more ranks there are two digits: about
    2√P messages instead of P, with twice the bytes.
    """
    base = size if size <= direct_ranks else math.isqrt(size - 1) + 1
    distances, rounds, weight = np.arange(size), [], 1
    while weight < size:
        digits = distances // weight % base
        rounds.append(tuple((digit * weight, np.flatnonzero(digits == digit))
                            for digit in range(1, int(digits.max()) + 1)))
        weight *= base
    return tuple(rounds)


def allgather_rows(row: NDArray[Any], transport: Transport) -> NDArray[Any]:
    """Return the short rows of all ranks, shape (P, m), of any dtype. Each rank's own has shape (m,)."""
    return transport.allgather(_whole_words(row)).view(row.dtype)[:, :len(row)]


def broadcast(values: NDArray[Any], transport: Transport) -> NDArray[Any]:
    """Return rank 0's array on all ranks. The values have the same shape (n,) and dtype on every rank."""
    message, found = values.view(np.uint8), np.empty(len(values), values.dtype)
    for start in range(0, len(message), CHUNK):
        part = message[start:start + CHUNK]
        sizes = np.zeros(transport.size, np.int64)
        sizes[0] = len(part)
        mine = part if transport.rank == 0 else part[:0]
        found.view(np.uint8)[start:start + CHUNK] = transport.allgatherv(mine, sizes)[0]
    return found


def alltoall_rows(rows: NDArray[Any], transport: Transport) -> NDArray[Any]:
    """Send a short row of any dtype to each rank; return those for this rank, by source. Both have shape (P, m)."""
    return transport.alltoall(_whole_words(rows)).view(rows.dtype)[:, :rows.shape[1]]


def _whole_words(rows: NDArray[Any]) -> Counts:
    missing = -rows.shape[-1] % (8 // rows.itemsize)
    filled = np.concatenate([rows, np.zeros((*rows.shape[:-1], missing), rows.dtype)], axis=-1)
    words: Counts = filled.view(np.int64)
    return words


def rotated_batches(rank: int, size: int, in_flight: int = MESSAGES_IN_FLIGHT) -> Iterator[list[tuple[int, int]]]:
    """Yield the (destination, source) pairs of an exchange in batches (Figure 2).

    No step has two senders to one rank. Batches have at least in_flight pairs, or all pairs if there are fewer.
    """
    steps = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    length = batch_length(size, in_flight)
    for first in range(0, len(steps), length):
        yield steps[first:first + length]


def batch_length(size: int, in_flight: int = MESSAGES_IN_FLIGHT) -> int:
    """Return how many messages are in flight at once: in_flight, or as many as make MOST_BATCHES batches.

    On many ranks the latencies of more batches would add up.
    """
    return max(in_flight, -(-(size - 1) // MOST_BATCHES))
