"""What an algorithm needs of a network: bytes and ranks, nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]
Values = NDArray[Any]
MESSAGES_IN_FLIGHT = 8
"""Messages of an exchange that fly at once while what came before them is decoded; more among many ranks."""
MOST_BATCHES = 8
"""The most batches in which the messages of an exchange fly."""
DIRECT_RANKS = 64
"""Of an alltoall, see alltoall_rounds. A message costs about 2 µs: among more ranks a second round costs less."""
TransportName = Literal["auto", "mpi", "horovod"]
Hierarchical = bool | int
"""Whether each host is one worker; or how many ranks, one after the other, are taken for a host's."""


class Transport(Protocol):
    """Blocking communication among `size` ranks. All ranks call the same methods in the same order.

    Every method raises TransportError where another rank failed or does not answer.
    """

    rank: int
    size: int
    concurrent: bool
    """Whether its calls may run on a thread of their own, beside whatever else this process sends."""

    def allgather(self, row: Counts) -> Counts:
        """Short rows (int64, same shape (m,) on every rank) of all ranks: int64, shape (P, m)."""

    def allreduce(self, values: Values) -> Values:
        """The element-wise sum of arrays of the same shape and dtype on every rank; the same bits on all of them."""

    def alltoall(self, rows: Counts) -> Counts:
        """Short rows, one for each rank (int64, same shape (P, m) on every rank): those for this one, by rank."""

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 ) -> Iterator[list[tuple[int, Bytes]]]:
        """Point-to-point messages, in batches; yields a batch's (source, message) pairs as it arrives.

        outgoing: message (uint8) by destination; incoming: number of bytes by source, each a multiple of 4.
        Neither holds this rank, nor empty messages. A transport may do all in one batch. The caller must exhaust it.
        """

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        """The messages (uint8) of all ranks, in rank order; sizes: their bytes, known to all ranks."""


class Signals(Protocol):
    """Numbers that ranks send each other unasked, from any thread, beside what a Transport carries."""

    def send(self, to: int, number: int) -> None:
        """Sends a number of 64 bits; does not wait. to: a rank, or this one."""

    def receive(self, timeout: float) -> int | None:
        """The next number, from whomever; None where none came for so many seconds. Called by one thread."""


@functools.lru_cache(maxsize=16)
def alltoall_rounds(size: int, direct_ranks: int = DIRECT_RANKS) -> tuple[tuple[tuple[int, Counts], ...], ...]:
    """The rounds of an alltoall: of each, the messages, as (to the so manieth rank after this one, blocks).

    Block d is what is on its way to the d-th rank after its source, by the digits of d (Bruck et al., 1997). Up to
    direct_ranks that is one digit, a message to each rank. Of more it is two: about 2√P messages instead of P, with
    twice the bytes.
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
    """Short rows of any dtype, of all ranks: shape (P, m). row: shape (m,)."""
    return transport.allgather(_whole_words(row)).view(row.dtype)[:, :len(row)]


def alltoall_rows(rows: NDArray[Any], transport: Transport) -> NDArray[Any]:
    """Short rows of any dtype, one for each rank: those for this one, by rank. rows: shape (P, m)."""
    return transport.alltoall(_whole_words(rows)).view(rows.dtype)[:, :rows.shape[1]]


def _whole_words(rows: NDArray[Any]) -> Counts:
    """With zeros at the end of each, so that they fill numbers of 8 bytes."""
    missing = -rows.shape[-1] % (8 // rows.itemsize)
    filled = np.concatenate([rows, np.zeros((*rows.shape[:-1], missing), rows.dtype)], axis=-1)
    words: Counts = filled.view(np.int64)
    return words


def rotated_batches(rank: int, size: int, in_flight: int = MESSAGES_IN_FLIGHT) -> Iterator[list[tuple[int, int]]]:
    """Yield the (destination, source) pairs of an exchange in batches (Figure 2).

    No step has two senders to one rank. Batches have at least in_flight pairs, or what there are.
    """
    steps = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    length = batch_length(size, in_flight)
    for first in range(0, len(steps), length):
        yield steps[first:first + length]


def batch_length(size: int, in_flight: int = MESSAGES_IN_FLIGHT) -> int:
    """Return how many messages fly at once: in_flight, or as many as make MOST_BATCHES batches.

    On many ranks the latencies of more batches would add up.
    """
    return max(in_flight, -(-(size - 1) // MOST_BATCHES))
