"""The transport of a reduction: MPI, or the collectives of the library that has started the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ..errors import AgreementError, PluginError
from .base import Counts, Transport
from .collectives import AloneTransport
from .counting import CountingTransport, explain_timeline
from .ending import watchdog
from .ranks import Hierarchical, NoMPI, Ranks, TransportName, is_elastic

if TYPE_CHECKING:  # mpi4py is imported only where MPI runs
    from .mpi.transport import MPITransport

logger = logging.getLogger("horovod_oktopk")

CHOICES: tuple[TransportName, ...] = get_args(TransportName)
UNEVEN = ("hierarchical={hierarchical} needs hosts with equally many ranks, which follow one another (as horovodrun "
          "and mpirun place them); got {sizes} ranks on the hosts, in the ranks' order. Start as many ranks on every "
          "host, or leave hierarchical out")
NO_ELASTIC = ("hierarchical cannot be used in an elastic job: with process sets, Horovod ends all processes when one "
              "of them fails (its issue 4021). Leave it out")


@dataclass(frozen=True)
class Connection:
    """The transport to all ranks, and the way to some of them."""

    transport: CountingTransport
    join: Callable[[Counts], Transport] = field(default=lambda _: AloneTransport())
    """Makes the transport among some of the ranks, by their numbers. Collective on these."""
    grid: Counts | None = None
    """The ranks' numbers, shape (hosts, ranks of a host); None if each rank is a worker."""

    def __str__(self) -> str:
        size = self.transport.size
        where = "" if self.grid is None else f" on {len(self.grid)} hosts, each of which is one worker,"
        return "1 rank, so nothing is compressed" if size == 1 else f"{size} ranks{where} over {self.transport.route}"


def connect(ranks: Ranks, choice: TransportName, hierarchical: Hierarchical = False) -> Connection:
    """Return the connection of this rank. Collective. Connect one reduction at a time.

    See Scheme for `hierarchical`. Raise PluginError if MPI is asked for and cannot be used, or hosts have different
    numbers of ranks. Raise AgreementError if the ranks' choices differ. All ranks raise the same error.
    """
    rank, size, _ = ranks.membership()
    if rank == 0:
        explain_timeline()
    if size == 1:
        return Connection(CountingTransport(AloneTransport()))
    (mpi_ranks, channels, yields), grid = introduce(ranks, choice, hierarchical)
    channel = int(channels.max())  # a rank may have made more of them
    if (mpi_ranks >= 0).all():
        make = partial(_mpi_transport, channel=channel, yield_cpu=bool(yields.any()))
        everyone = make(mpi_ranks, meet=partial(barrier, ranks, f"end.{channel}"))
        step = nullcontext if grid is None else everyone.gate.busy
        return Connection(CountingTransport(everyone, step=step, route="MPI"),
                          lambda group: make(mpi_ranks[group], meet=lambda: None, parent=everyone), grid)
    reason = ranks.mpi_rank()
    reason = reason if isinstance(reason, NoMPI) else NoMPI("another rank cannot use MPI (see its warning)")
    if choice == "mpi":
        raise PluginError(f"transport='mpi' cannot be used: {reason.why}. Or use transport='horovod' or 'auto'")
    if choice == "auto" and reason.warns:
        logger.warning("using %s, not MPI: %s", ranks.collectives, reason.why)
    why = "the options say so" if choice == "horovod" else reason.why
    if grid is not None:
        ranks.divide([*grid.T, *grid])
    return Connection(CountingTransport(ranks.transport(channel), route=f"{ranks.collectives}, as {why}"),
                      lambda group: ranks.transport(f"{channel}.hosts", group), grid)


def introduce(ranks: Ranks, choice: TransportName, hierarchical: Hierarchical) -> tuple[Counts, Counts | None]:
    """Gather the choices of all ranks. Collective.

    Return the ranks' numbers in MPI.COMM_WORLD (-1 for a rank that does not use MPI), channels, and yield_cpu, shape
    (3, P); and the ranks' numbers, shape (hosts, ranks of a host), or None if each rank is a worker.
    Raise AgreementError if choices differ; PluginError if hosts cannot be workers. All ranks raise the same error.
    """
    if hierarchical and is_elastic():  # on all ranks
        raise PluginError(NO_ELASTIC)
    mpi_rank = -1 if choice == "horovod" else ranks.mpi_rank()
    mine = [-1 if isinstance(mpi_rank, NoMPI) else mpi_rank, ranks.channel, ranks.yield_cpu, CHOICES.index(choice),
            -1 if hierarchical is True else int(hierarchical), ranks.host()[0]]
    rows = ranks.transport(0).allgather(np.array(mine, np.int64)).T
    _check_equal("transports", [CHOICES[code] for code in rows[3]])
    _check_equal("options hierarchical", [code == -1 if code < 1 else code for code in rows[4].tolist()])
    return rows[:3], grid_of(hierarchical, rows[5]) if hierarchical else None


def grid_of(hierarchical: Hierarchical, first: Counts) -> Counts | None:
    """Return the ranks' numbers, shape (hosts, ranks of a host); None if each rank is a host of its own.

    `first` holds, by rank, the number of the first rank of its host.
    Raise PluginError if hosts have different numbers of ranks, or their ranks do not follow one another.
    """
    ranks = np.arange(len(first))
    if hierarchical is not True:
        first = ranks // hierarchical
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    sizes = np.diff(starts, append=len(first))
    alternate = len(np.unique(first)) < len(starts)
    if alternate or (sizes != (sizes[0] if hierarchical is True else hierarchical)).any():
        raise PluginError(UNEVEN.format(hierarchical=hierarchical, sizes=sizes.tolist()))
    return None if sizes[0] == 1 else ranks.reshape(-1, sizes[0])


def barrier(ranks: Ranks, name: str = "barrier") -> None:
    """Wait for all ranks, over the library's own collectives. Collective.

    The first rank to go on may shut down Horovod, and MPI with it. No MPI call is under way by then.
    """
    ranks.transport(name).allgather(np.zeros(1, np.int64))


def _check_equal(what: str, by_rank: list[Any]) -> None:
    if any(one != by_rank[0] for one in by_rank):
        raise AgreementError(f"the ranks of this reduction chose different {what}, by rank: {by_rank}. "
                             "Give all the same")


_mpi_transports: dict[Any, MPITransport] = {}


def _mpi_transport(world_ranks: Counts, channel: int, yield_cpu: bool, meet: Callable[[], None],
                   parent: MPITransport | None = None) -> MPITransport:
    """Return the transport of these world ranks and channel: no message meets another's, or Horovod's.

    The parent is the transport of all ranks, if these are some of them. Each rank is in at most two such groups.
    """
    members = tuple(world_ranks.tolist())
    key = members, channel, yield_cpu, parent
    if key not in _mpi_transports:
        from mpi4py import MPI

        from .mpi.transport import MPITransport
        group = MPI.COMM_WORLD.group.Incl(list(members))
        transport = MPITransport(MPI.COMM_WORLD.Create_group(group, channel), yield_cpu, channel)
        watchdog(int(MPI.COMM_WORLD.rank), int(MPI.COMM_WORLD.size)).watch(transport, members, meet, parent)
        _mpi_transports[key] = transport
    return _mpi_transports[key]
