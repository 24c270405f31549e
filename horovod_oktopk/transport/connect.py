"""The transport of a reduction: MPI, or the collectives of the library that has started the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import AgreementError, PluginError
from .base import AloneTransport, Counts, Hierarchical, Transport, TransportName
from .counting import CountingTransport, explain_timeline, on_hosts
from .mpi import ending
from .ranks import Join, Ranks, check_not_elastic, from_code, grid_of, groups, to_code

if TYPE_CHECKING:  # mpi4py is imported only where MPI runs
    from .mpi.transport import MPITransport

logger = logging.getLogger("horovod_oktopk")

CHOICES: tuple[TransportName, ...] = ("auto", "mpi", "horovod")


def connect(ranks: Ranks, choice: TransportName, hierarchical: Hierarchical = False) -> CountingTransport:
    """Return the transport of this rank. Collective. Connect one reduction at a time.

    hierarchical: see Scheme. If set, the transport is that of a step in which each host is one worker.
    Raise PluginError if MPI is asked for and cannot be used, or hosts have different numbers of ranks. Raise
    AgreementError if the ranks' choices differ. All ranks raise the same error.
    """
    rank, size, _ = ranks.membership()
    if rank == 0:
        explain_timeline()
    if size == 1:
        return CountingTransport(AloneTransport())
    met = introduce(ranks, choice, hierarchical)
    if (met.mpi_ranks >= 0).all():
        return _over_mpi(ranks, met)
    reason = ranks.mpi_rank()
    reason = reason if isinstance(reason, str) else "another rank cannot use MPI (see its warning)"
    if choice == "mpi":
        raise PluginError(f"transport='mpi' cannot be used: {reason}. Or use transport='horovod' or 'auto'")
    if choice == "auto" and ranks.runs_on_mpi:
        logger.warning("using Horovod's collectives, not MPI: %s", reason)
    why = "the options say so" if choice == "horovod" else reason
    return _over_collectives(ranks, met, f"Horovod's collectives, as {why}")


class Introduction(NamedTuple):
    """The choices that the ranks have told one another."""

    mpi_ranks: Counts
    """The ranks' numbers in MPI.COMM_WORLD; -1 for a rank that does not use MPI."""
    channel: int
    yield_cpu: bool
    grid: Counts | None
    """The ranks' numbers, shape (hosts, ranks of a host); None if each rank is a worker."""


def introduce(ranks: Ranks, choice: TransportName, hierarchical: Hierarchical) -> Introduction:
    """Gather the choices of all ranks. Collective.

    Raise AgreementError if choices differ; PluginError if hosts cannot be workers. All ranks raise the same error.
    """
    if hierarchical:
        check_not_elastic()
    mpi_rank = -1 if choice == "horovod" else ranks.mpi_rank()
    mine = [-1 if isinstance(mpi_rank, str) else mpi_rank, CHOICES.index(choice), ranks.channel, ranks.yield_cpu,
            to_code(hierarchical), ranks.host().first]
    rows = ranks.transport(0).allgather(np.array(mine, np.int64))
    _check_equal("transports", [CHOICES[code] for code in rows[:, 1]])
    _check_equal("options hierarchical", [from_code(int(code)) for code in rows[:, 4]])
    channel = int(rows[:, 2].max())  # a rank may have made more of them
    grid = grid_of(hierarchical, rows[:, 5]) if hierarchical else None
    return Introduction(rows[:, 0], channel, bool(rows[:, 3].any()), grid)


def barrier(ranks: Ranks, name: str = "barrier") -> None:
    """Wait for all ranks, over the library's own collectives. Collective.

    The first rank to go on may shut down Horovod, and MPI with it. No MPI call is under way by then.
    """
    ranks.transport(name).allgather(np.zeros(1, np.int64))


def _over_mpi(ranks: Ranks, met: Introduction) -> CountingTransport:
    """Return the transport over MPI: among all ranks, and among a host's, if each host is one worker."""
    members = tuple(met.mpi_ranks.tolist())
    everyone = _mpi_transport(members, met.channel, met.yield_cpu, partial(barrier, ranks, f"end.{met.channel}"))

    def join(group: Counts) -> Transport:
        return _mpi_transport(tuple(met.mpi_ranks[group].tolist()), met.channel, met.yield_cpu, lambda: None,
                              everyone)

    return _joined(everyone, met.grid, join, "MPI", everyone.gate.held)


def _over_collectives(ranks: Ranks, met: Introduction, route: str) -> CountingTransport:
    if met.grid is not None:
        ranks.divide([*met.grid.T, *met.grid])
    return _joined(ranks.transport(met.channel), met.grid,
                   lambda group: ranks.transport(f"{met.channel}.hosts", group), route)


def _joined(everyone: Transport, grid: Counts | None, join: Join, route: str,
            step: Callable[[], AbstractContextManager[None]] = nullcontext) -> CountingTransport:
    if grid is None:
        return CountingTransport(everyone, route=route)
    return on_hosts(everyone, *groups(grid, everyone.rank, join), grid, step, route)


def _check_equal(what: str, by_rank: list[Any]) -> None:
    if any(one != by_rank[0] for one in by_rank):
        raise AgreementError(f"the ranks of this reduction chose different {what}, by rank: {by_rank}. "
                             "Give all the same")


_mpi_transports: dict[Any, MPITransport] = {}


def _mpi_transport(members: tuple[int, ...], channel: int, yield_cpu: bool, meet: Callable[[], None],
                   parent: MPITransport | None = None) -> MPITransport:
    """Return the transport of these world ranks and channel: no message meets another's, or Horovod's.

    parent: the transport of all ranks, if these are some of them. Each rank is in at most two such groups.
    """
    key = members, channel, yield_cpu, parent
    if key not in _mpi_transports:
        from mpi4py import MPI

        from .mpi.transport import MPITransport
        group = MPI.COMM_WORLD.group.Incl(list(members))
        transport = MPITransport(MPI.COMM_WORLD.Create_group(group, channel), yield_cpu, channel)
        ending.watch(transport, int(MPI.COMM_WORLD.rank), members, meet, parent)
        _mpi_transports[key] = transport
    return _mpi_transports[key]
