"""Which network the ranks of a process set of Horovod talk over: MPI, or Horovod's own collectives."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import AgreementError, PluginError
from . import ending, tracing
from .alone import AloneTransport
from .base import Counts, Hierarchical, Transport, TransportName
from .counting import CountingTransport, on_hosts
from .horovod import Collectives, HorovodTransport
from .hosts import (
    Join,
    check_not_elastic,
    from_code,
    grid_of,
    groups,
    may_add_process_sets,
    process_sets,
    to_code,
)

if TYPE_CHECKING:  # mpi4py is imported only where MPI runs
    from .mpi import MPITransport

logger = logging.getLogger("horovod_oktopk")

NEEDS_ALL_RANKS = ("StepAhead with hierarchical=True needs all ranks of the job: give the number of ranks of a host "
                   "instead, or no process set")
CHOICES: tuple[TransportName, ...] = ("auto", "mpi", "horovod")


@dataclass(frozen=True)
class Network:
    """The ranks of one process set, as they are at present: elastic training changes them.

    hvd: horovod.torch or horovod.tensorflow. collectives: makes that framework's Collectives, for a process set and a
        channel.
    channel: sets apart the messages of reductions that may run at the same time, in an order that differs between
        ranks: a number of its own for each, in the order in which the ranks make them; 0 for all that do not.
    yield_cpu: see MPITransport.
    """

    hvd: Any
    process_set: Any
    collectives: Callable[[Any, int | str], Collectives]
    channel: int = 0
    yield_cpu: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether this rank is one of them; if not, what it trains is its own, as in stock."""
        return bool(self.process_set.included())

    def membership(self) -> tuple[int, int, int]:
        """(rank, size, how often elastic training has begun anew in this process)."""
        return int(self.process_set.rank()), int(self.process_set.size()), _resets

    def barrier(self, name: str = "barrier") -> None:
        """Waits for all ranks of the process set, by Horovod's own collectives: nothing of MPI is under way here
        when the first of them goes on, and perhaps shuts Horovod down, and MPI with it, on all."""
        HorovodTransport(self.collectives(self.process_set, name)).allgather(np.zeros(1, np.int64))

    def ranks_per_host(self, hierarchical: Hierarchical) -> int:
        """How many ranks a worker has; see Scheme. `connect` finds out whether it can be so."""
        if self.process_set.size() == 1 or not hierarchical:
            return 1
        if hierarchical is not True:
            return int(hierarchical)
        if self.process_set.size() != self.hvd.size():  # Horovod knows how many ranks of the job a host has
            raise PluginError(NEEDS_ALL_RANKS)
        return int(self.hvd.local_size())

    def host_set(self, choice: TransportName, hierarchical: Hierarchical) -> Any:
        """Horovod's process set of the ranks of this rank's host; None if it is alone there. On all ranks together.

        Raises as `connect` does, and PluginError where process sets cannot be added; on all of them.
        """
        if self.process_set.size() == 1:
            return None
        rows = self._introduce(choice, hierarchical)
        grid = grid_of(hierarchical, rows[:, 5])
        if grid is None:
            return None
        sets = process_sets(self.hvd, [rows[host, 6] for host in grid], bool(rows[:, 7].all()))
        return next(each for ranks, each in sets.items() if self.hvd.rank() in ranks)

    def connect(self, choice: TransportName, hierarchical: Hierarchical = False) -> CountingTransport:
        """The transport of this rank; called on all ranks of the process set together, by one reduction at a time.

        hierarchical: see Scheme. Then the transport is that of a step in which each host is one worker.
        Raises PluginError where MPI is asked for and cannot be used, and where hosts have different numbers of ranks;
        AgreementError where the ranks' choices differ. All ranks raise it.
        """
        if self.hvd.rank() == 0:
            tracing.explain_timeline()
        if self.process_set.size() == 1:
            return CountingTransport(AloneTransport())
        rows = self._introduce(choice, hierarchical)
        channel = int(rows[:, 2].max())  # a rank may have made more of them
        grid = grid_of(hierarchical, rows[:, 5]) if hierarchical else None
        if (rows[:, 0] >= 0).all():  # yield_cpu and other collectives do not meet: MPI has them apart
            return self._over_mpi(rows[:, 0], channel, bool(rows[:, 3].any()), grid)
        reason = _why_not_mpi(self.hvd) or "another rank cannot use MPI"
        if choice == "mpi":
            raise PluginError(f"transport='mpi' cannot be used: {reason}. Or use transport='horovod' or 'auto'")
        if choice == "auto" and self.hvd.mpi_enabled():
            logger.warning("using Horovod's collectives, not MPI: %s", reason)
        why = "the options say so" if choice == "horovod" else reason
        route = f"Horovod's collectives, as {why}"
        return self._over_horovod(rows[:, 6], channel, grid, bool(rows[:, 7].all()), route)

    def _introduce(self, choice: TransportName, hierarchical: Hierarchical) -> Counts:
        """All ranks' rows: world rank in MPI (-1: not over MPI), choice, channel, yield_cpu, hierarchical, the first
        rank of its host, its own, and whether it may add process sets.

        Raises AgreementError where choices differ, PluginError in an elastic job that asks for hosts; on all of them.
        """
        if hierarchical:
            check_not_elastic()
        reason = _why_not_mpi(self.hvd)
        mine = [-1 if reason or choice == "horovod" else _world_rank(), CHOICES.index(choice), self.channel,
                self.yield_cpu, to_code(hierarchical), self.hvd.rank() - self.hvd.local_rank(), self.hvd.rank(),
                may_add_process_sets(self.hvd, self.process_set)]
        rows = HorovodTransport(self.collectives(self.process_set, 0)).allgather(np.array(mine, np.int64))
        _check_equal("transports", [CHOICES[code] for code in rows[:, 1]])
        _check_equal("options hierarchical", [from_code(int(code)) for code in rows[:, 4]])
        return rows

    def _over_mpi(self, world_ranks: Counts, channel: int, yield_cpu: bool, grid: Counts | None) -> CountingTransport:
        members = tuple(world_ranks.tolist())
        everyone = _mpi_transport(members, channel, yield_cpu, partial(self.barrier, f"end.{channel}"))

        def join(ranks: Counts) -> Transport:
            return _mpi_transport(tuple(world_ranks[ranks].tolist()), channel, yield_cpu, lambda: None, everyone)

        return _joined(everyone, grid, join, "MPI", everyone.gate.held)

    def _over_horovod(self, ranks: Counts, channel: int, grid: Counts | None, may_add: bool,
                      route: str) -> CountingTransport:
        everyone = HorovodTransport(self.collectives(self.process_set, channel))
        sets = {} if grid is None else process_sets(
            self.hvd, [ranks[part] for part in (*grid.T, *grid)], may_add)

        def join(members: Counts) -> Transport:
            return HorovodTransport(self.collectives(sets[tuple(ranks[members].tolist())], f"{channel}.hosts"))

        return _joined(everyone, grid, join, route)


def _joined(everyone: Transport, grid: Counts | None, join: Join, route: str,
            step: Callable[[], AbstractContextManager[None]] = nullcontext) -> CountingTransport:
    if grid is None:
        return CountingTransport(everyone, route=route)
    return on_hosts(everyone, *groups(grid, everyone.rank, join), grid, step, route)


def _check_equal(what: str, by_rank: list[Any]) -> None:
    if any(one != by_rank[0] for one in by_rank):
        raise AgreementError(f"the ranks of this reduction chose different {what}, by rank: {by_rank}")


_channels: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))


def new_channel(process_set: Any) -> int:
    """The next channel of a process set; see Network."""
    return next(_channels[process_set.process_set_id])


_resets = 0


def count_resets(state: Any) -> None:
    """Wraps the `on_reset` of horovod.common.elastic.State; once. Ranks may change while this one's number stays."""
    if hasattr(state.on_reset, "_oktopk_installed"):
        return
    on_reset = state.on_reset

    @functools.wraps(on_reset)
    def wrapped(self: Any) -> None:
        global _resets
        _resets += 1
        on_reset(self)

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    state.on_reset = wrapped


def _why_not_mpi(hvd: Any) -> str | None:
    """Why MPI cannot be used; None where it can."""
    if not hvd.mpi_enabled():
        return "Horovod does not run on MPI (start the job with `horovodrun --mpi`)"
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


_mpi_transports: dict[Any, MPITransport] = {}


def _mpi_transport(members: tuple[int, ...], channel: int, yield_cpu: bool, meet: Callable[[], None],
                   parent: MPITransport | None = None) -> MPITransport:
    """One communicator for each set of world ranks and channel, so that no message meets another's, or Horovod's.

    parent: where they are some of the ranks of that transport, each of which is in two such sets at most.
    """
    key = members, channel, yield_cpu, parent
    if key not in _mpi_transports:
        from mpi4py import MPI

        from .mpi import MPITransport
        group = MPI.COMM_WORLD.group.Incl(list(members))
        transport = MPITransport(MPI.COMM_WORLD.Create_group(group, channel), yield_cpu, channel)
        ending.watch(transport, _world_rank(), members, meet, parent)
        _mpi_transports[key] = transport
    return _mpi_transports[key]
