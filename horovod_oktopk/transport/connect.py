"""Which network the ranks of a process set of Horovod talk over: MPI, or Horovod's own collectives."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..errors import AgreementError, PluginError
from .base import Transport, TransportName
from .horovod import Collectives, HorovodTransport
from .local import LocalTransport, LocalWorld

logger = logging.getLogger("horovod_oktopk")

CHOICES: tuple[TransportName, ...] = ("auto", "mpi", "horovod")


@dataclass(frozen=True)
class Network:
    """The ranks of one process set, as they are at present: elastic training changes them.

    hvd: horovod.torch or horovod.tensorflow. collectives: makes that framework's Collectives.
    lane: over MPI, each has a communicator of its own. Reductions that may run at the same time need different lanes,
        the same on all ranks.
    """

    hvd: Any
    process_set: Any
    collectives: Callable[[Any], Collectives]
    lane: int = 0

    def membership(self) -> tuple[int, int]:
        """(rank, size)."""
        return int(self.process_set.rank()), int(self.process_set.size())

    def connect(self, choice: TransportName) -> Transport:
        """The transport of this rank; called on all ranks of the process set together.

        Raises PluginError where MPI is asked for and cannot be used, AgreementError where the ranks' choices differ.
        """
        if self.process_set.size() == 1:
            return LocalTransport(LocalWorld(1), 0)
        fallback = HorovodTransport(self.collectives(self.process_set))
        if not self.hvd.mpi_enabled():
            if choice == "mpi":
                raise PluginError("transport='mpi' needs a Horovod that runs on MPI: start the job with "
                                  "`horovodrun --mpi`, or use transport='horovod' or 'auto'")
            return fallback
        reason = _why_not_mpi(self.hvd)
        mine = [-1 if reason or choice == "horovod" else _world_rank(), CHOICES.index(choice)]
        rows = fallback.allgather(np.array(mine, np.int64))
        if (rows[:, 1] != rows[0, 1]).any():
            raise AgreementError(f"the ranks of this reduction chose different transports, by rank: "
                                 f"{[CHOICES[code] for code in rows[:, 1]]}")
        if (rows[:, 0] >= 0).all():
            return _mpi_transport(tuple(rows[:, 0].tolist()), self.lane)
        if choice == "mpi":
            raise PluginError(f"transport='mpi' cannot be used: {reason or 'another rank cannot use it'}")
        if choice == "auto":
            logger.warning("using Horovod's collectives, not MPI: %s", reason or "another rank cannot use mpi4py")
        return fallback


def _why_not_mpi(hvd: Any) -> str | None:
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
def _mpi_transport(world_ranks: tuple[int, ...], lane: int) -> Transport:
    """One communicator for each set of ranks and lane, apart from Horovod's, so that no message meets another's."""
    from mpi4py import MPI

    from .mpi import MPITransport
    group = MPI.COMM_WORLD.group.Incl(list(world_ranks))
    return MPITransport(MPI.COMM_WORLD.Create_group(group, lane))
