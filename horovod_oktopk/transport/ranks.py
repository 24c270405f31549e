"""The ranks of a training job: all that is asked of the library that has started them, Horovod or another."""

from __future__ import annotations

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
    """The number of its first rank in the whole job."""
    size: int | None
    """The number of its ranks; None if these ranks are a part of the job."""


class Ranks(Protocol):
    """The ranks that reduce together; one object for each reduction, on each rank.

    channel: sets apart the messages of reductions that may run at the same time, in an order that differs between
        ranks: a number of its own for each, in the order in which the ranks make them; 0 for all that do not.
    yield_cpu: see MPITransport.
    """

    channel: int
    yield_cpu: bool

    @property
    def base(self) -> object:
        """The library; one object for all reductions of a rank."""

    @property
    def takes_part(self) -> bool:
        """True if this process is one of them; otherwise it trains for itself."""

    def membership(self) -> Membership:
        """Return this rank's present place; asked for at every step."""

    def host(self) -> Host:
        """Return this rank's host."""

    def divide(self, groups: Iterable[Counts]) -> None:
        """Prepare transports among some of the ranks. Collective.

        groups: ranks' numbers, the same groups on every rank. Raise PluginError if that is impossible.
        """

    def transport(self, channel: int | str, members: Counts | None = None) -> Transport:
        """Return a transport over the library's own collectives: among all, or among a group after `divide`."""

    @property
    def runs_on_mpi(self) -> bool:
        """True if the library has started MPI."""

    def mpi_rank(self) -> int | str:
        """Return this process's number in MPI.COMM_WORLD; or why MPI cannot be used, in words."""
