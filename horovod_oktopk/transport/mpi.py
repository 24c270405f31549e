"""Ranks of an MPI communicator, through mpi4py. Import only where MPI runs already: under --gloo,
importing mpi4py would start a second MPI and abort the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import TransportError
from .base import Bytes, Counts, Values, rotated_buckets

TAG = 1


class MPITransport:
    """An intra-communicator of our own, so that no message meets another library's.

    comm: an mpi4py communicator. Its error handler is set to raise, as mpi4py's default is.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank = int(comm.Get_rank())
        self.size = int(comm.Get_size())

    def allgather(self, row: Counts) -> Counts:
        rows = np.empty((self.size, len(row)), np.int64)
        with _errors():
            self.comm.Allgather(np.ascontiguousarray(row), rows)
        return rows

    def allreduce(self, values: Values) -> Values:
        total = np.empty_like(values)
        with _errors():
            self.comm.Allreduce(np.ascontiguousarray(values), total, op=MPI.SUM)
        return total

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 bucket_size: int) -> Iterator[list[tuple[int, Bytes]]]:
        flying: tuple[list[Any], list[tuple[int, Bytes]]] | None = None
        with _errors():
            for bucket in rotated_buckets(self.rank, self.size, bucket_size):
                posted = self._post(bucket, outgoing, incoming)
                if flying is not None:  # the next bucket is under way while the caller sums this one
                    MPI.Request.Waitall(flying[0])
                    yield flying[1]
                flying = posted
            if flying is not None:
                MPI.Request.Waitall(flying[0])
                yield flying[1]

    def _post(self, bucket: list[tuple[int, int]], outgoing: Mapping[int, Bytes],
              incoming: Mapping[int, int]) -> tuple[list[Any], list[tuple[int, Bytes]]]:
        arrivals = [(source, np.empty(incoming[source], np.uint8)) for _, source in bucket if source in incoming]
        requests = [self.comm.Irecv([buffer, MPI.BYTE], source, TAG) for source, buffer in arrivals]
        requests += [self.comm.Isend([outgoing[to], MPI.BYTE], to, TAG) for to, _ in bucket if to in outgoing]
        return requests, arrivals

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        gathered = np.empty(int(sizes.sum()), np.uint8)
        with _errors():
            self.comm.Allgatherv([message, MPI.BYTE], [gathered, sizes, MPI.BYTE])
        return np.split(gathered, np.cumsum(sizes)[:-1])


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise TransportError(f"MPI failed: {error}") from error
