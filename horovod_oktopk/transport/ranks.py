"""The ranks that reduce together: what is asked of the library that has started them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .base import Counts, Transport

TransportName = Literal["auto", "mpi", "horovod"]
Hierarchical = bool | int
"""True if each host is one worker; or the number of consecutive ranks that count as a host."""


def is_elastic() -> bool:
    """Return True in an elastic job, whose states send parameters and residuals themselves."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


class Membership(NamedTuple):
    """A rank's place in its job, for as long as elastic training does not change it."""

    rank: int
    size: int
    generation: int
    """The number of times that elastic training has begun anew in this process."""


@dataclass(frozen=True)
class NoMPI:
    """The reason, in words, why MPI cannot be used. `warns`: that it could be, if something were set right."""

    why: str
    warns: bool = True


class Ranks(ABC):
    """The ranks that reduce together; one object for each reduction, on each rank.

    `base` is the library, one object for all reductions of a rank. See MPITransport for `yield_cpu`. `channel`
    separates the messages of reductions that may run at the same time, in orders that differ by rank: each such
    reduction has a number of its own, in the order in which the ranks make them; all others have 0.
    """

    base: object
    collectives: str
    """The library's own collectives, in words for the log."""
    channel: int
    yield_cpu: bool

    @property
    @abstractmethod
    def takes_part(self) -> bool:
        """True if this process is one of the ranks; otherwise it trains for itself."""

    @abstractmethod
    def membership(self) -> Membership:
        """Return this rank's present place. Called at every step."""

    @abstractmethod
    def host(self) -> tuple[int, int | None]:
        """Return the number of the host's first rank in the whole job, and how many ranks the host has.

        The latter is None if these ranks are a part of the job.
        """

    @abstractmethod
    def divide(self, groups: Iterable[Counts]) -> None:
        """Prepare transports among some of the ranks. Collective.

        The groups are of ranks' numbers, the same on every rank. Raise PluginError if the division is impossible.
        """

    @abstractmethod
    def transport(self, channel: int | str, members: Counts | None = None) -> Transport:
        """Return a transport over the library's own collectives: among all ranks, or among a group after `divide`."""

    @abstractmethod
    def mpi_rank(self) -> int | NoMPI:
        """Return this process's number in MPI.COMM_WORLD, or the reason why MPI cannot be used."""
