"""The ranks of a training job: the whole interface to the library that has started them, Horovod or another.

Beside it: limits on the time for which ranks wait for one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from .base import Counts, Transport


class Membership(NamedTuple):
    """A rank's place in its job, for as long as elastic training does not change it."""

    rank: int
    size: int
    generation: int
    """The number of times that elastic training has begun anew in this process."""


class Host(NamedTuple):
    """The host of a rank."""

    first: int
    """The number of the host's first rank in the whole job."""
    size: int | None
    """The number of the host's ranks; None if these ranks are a part of the job."""


class Ranks(Protocol):
    """The ranks that reduce together; one object for each reduction, on each rank.

    base: the library; one object for all reductions of a rank.
    channel: separates the messages of reductions that may run at the same time, in orders that differ by rank.
        Each such reduction has a number of its own, in the order in which the ranks make them; all others have 0.
    yield_cpu: see MPITransport.
    """

    base: object
    channel: int
    yield_cpu: bool

    @property
    def takes_part(self) -> bool:
        """True if this process is one of the ranks; otherwise it trains for itself."""

    def membership(self) -> Membership:
        """Return this rank's present place. Called at every step."""

    def host(self) -> Host:
        """Return this rank's host."""

    def divide(self, groups: Iterable[Counts]) -> None:
        """Prepare transports among some of the ranks. Collective.

        groups: ranks' numbers, the same groups on every rank. Raise PluginError if the division is impossible.
        """

    def transport(self, channel: int | str, members: Counts | None = None) -> Transport:
        """Return a transport over the library's own collectives: among all ranks, or among a group after `divide`."""

    @property
    def runs_on_mpi(self) -> bool:
        """True if the library has started MPI."""

    def mpi_rank(self) -> int | str:
        """Return this process's number in MPI.COMM_WORLD; or the reason, in words, why MPI cannot be used."""


class StallLimits(NamedTuple):
    """Horovod's settings. warning, shutdown: seconds, 0 for never."""

    warning: float
    shutdown: float

    @classmethod
    def of_horovod(cls) -> StallLimits:
        """Read the variables that Horovod and `horovodrun` know."""
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(0.0, 0.0)
        return cls(float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60),
                   float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0))

    def patience(self, timeout: float) -> float:
        """Return the seconds after which to end a wait that would otherwise end after `timeout`."""
        return min(timeout, self.shutdown or timeout)
