"""Which network the ranks of a process set talk over: MPI, or Horovod's own collectives."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import horovod.torch as hvd
import numpy as np

import torch

from ..core.wire import WORD
from ..errors import AgreementError, PluginError
from ..options import TransportName
from ..transport.base import Bytes, Counts, Transport
from ..transport.local import LocalTransport, LocalWorld

logger = logging.getLogger("horovod_oktopk")


class HorovodTransport:
    """Horovod's allgather, allreduce and alltoall as a Transport; for Gloo and NCCL builds.

    Calls are blocking and follow one another, so constant names serve; what fails raises
    HorovodInternalError, which elastic training catches.
    """

    def __init__(self, process_set: Any) -> None:
        self._set = process_set
        self.rank = int(process_set.rank())
        self.size = int(process_set.size())

    def allgather(self, row: Counts) -> Counts:
        gathered = hvd.allgather(torch.from_numpy(row), name="horovod_oktopk.allgather", process_set=self._set)
        rows: Counts = gathered.numpy().reshape(self.size, len(row))
        return rows

    def allreduce(self, counts: Counts) -> Counts:
        total: Counts = hvd.allreduce(torch.from_numpy(counts), name="horovod_oktopk.allreduce", op=hvd.Sum,
                                      process_set=self._set).numpy()
        return total

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 _bucket_size: int) -> Iterator[list[tuple[int, Bytes]]]:
        """All messages in one bucket; their lengths must be multiples of 4 bytes."""
        splits = torch.tensor([len(outgoing.get(to, ())) // WORD for to in range(self.size)], dtype=torch.int32)
        joined = np.concatenate([np.empty(0, np.uint8), *(outgoing[to] for to in sorted(outgoing))])
        received, _ = hvd.alltoall(torch.from_numpy(joined.view(np.int32)), splits=splits,
                                   name="horovod_oktopk.alltoall", process_set=self._set)
        sources = sorted(incoming)
        cuts = np.cumsum([incoming[source] for source in sources])[:-1]
        yield list(zip(sources, np.split(received.numpy().view(np.uint8), cuts), strict=True)) if sources else []

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        """The messages' lengths must be multiples of 4 bytes, as those of sparse vectors are; others are padded."""
        padded = np.zeros(-(-len(message) // WORD) * WORD, np.uint8)
        padded[:len(message)] = message
        gathered = hvd.allgather(torch.from_numpy(padded.view(np.int32)), name="horovod_oktopk.allgatherv",
                                 process_set=self._set).numpy().view(np.uint8)
        ends = np.cumsum(-(-sizes // WORD) * WORD)
        return [gathered[end - -(-size // WORD) * WORD:][:size] for end, size in zip(ends, sizes, strict=True)]


def connect(process_set: Any, choice: TransportName) -> Transport:
    """The transport of this rank's process set; called on all of its ranks together.

    Raises PluginError where MPI is asked for and cannot be used, AgreementError where the ranks' choices differ.
    """
    if process_set.size() == 1:
        return LocalTransport(LocalWorld(1), 0)
    if not hvd.mpi_enabled():
        if choice == "mpi":
            raise PluginError("transport='mpi' needs a Horovod that runs on MPI: start the job with "
                              "`horovodrun --mpi`, or use transport='horovod' or 'auto'")
        return HorovodTransport(process_set)
    reason = _why_not_mpi()
    mine = [-1 if reason or choice == "horovod" else _world_rank(), ["auto", "mpi", "horovod"].index(choice)]
    rows = HorovodTransport(process_set).allgather(np.array(mine, np.int64))
    if (rows[:, 1] != rows[0, 1]).any():
        raise AgreementError(f"the ranks of this reduction chose different transports, by rank: "
                             f"{[['auto', 'mpi', 'horovod'][code] for code in rows[:, 1]]}")
    if (rows[:, 0] >= 0).all():
        return _mpi_transport(tuple(rows[:, 0].tolist()))
    if choice == "mpi":
        raise PluginError(f"transport='mpi' cannot be used: {reason or 'another rank cannot use it'}")
    if choice == "auto":
        logger.warning("using Horovod's collectives, not MPI: %s", reason or "another rank cannot use mpi4py")
    return HorovodTransport(process_set)


def _why_not_mpi() -> str | None:
    """Why mpi4py cannot be used beside a Horovod that runs on MPI; None where it can."""
    if os.environ.get("HOROVOD_MPI_THREADS_DISABLE") == "1" or not hvd.mpi_threads_supported():
        return "MPI runs without MPI_THREAD_MULTIPLE (see HOROVOD_MPI_THREADS_DISABLE)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    import mpi4py
    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # Horovod has started MPI, and ends it
    from mpi4py import MPI
    if not MPI.Is_initialized():
        return "mpi4py has loaded another MPI library than Horovod; rebuild one of the two"
    return None


def _world_rank() -> int:
    from mpi4py import MPI
    return int(MPI.COMM_WORLD.rank)


@cache
def _mpi_transport(world_ranks: tuple[int, ...]) -> Transport:
    """One communicator for each set of ranks, apart from Horovod's, so that no message meets another's."""
    from mpi4py import MPI

    from ..transport.mpi import MPITransport
    group = MPI.COMM_WORLD.group.Incl(list(world_ranks))
    return MPITransport(MPI.COMM_WORLD.Create_group(group))
