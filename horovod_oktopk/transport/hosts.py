"""Which ranks share a host, where each host is one worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..errors import PluginError
from .alone import AloneTransport
from .base import Counts, Hierarchical, Transport

Join = Callable[[Counts], Transport]
"""Makes the transport among some of the ranks, by their numbers; on all of these together."""

UNEVEN = ("hierarchical={hierarchical} needs hosts with equally many ranks, which follow one another (as horovodrun "
          "and mpirun place them); got {sizes} ranks on the hosts, in the ranks' order. Start as many ranks on every "
          "host, or leave hierarchical out")
NO_ELASTIC = ("hierarchical cannot be used in an elastic job: with process sets, Horovod ends all processes when one "
              "of them fails (its issue 4021). Leave it out")
NO_SETS = ("hierarchical needs Horovod's process sets for the ranks of each host, and for those that have the same "
           "place on all hosts; missing are {missing}. Call hvd.init(process_sets=\"dynamic\"), and give the "
           "optimizer no process set")


def check_not_elastic() -> None:
    """Raises PluginError in an elastic job; all ranks know that it is one."""
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise PluginError(NO_ELASTIC)


def to_code(hierarchical: Hierarchical) -> int:
    """As a number: 0 for flat, -1 for hosts as they are."""
    return -1 if hierarchical is True else int(hierarchical)


def from_code(code: int) -> Hierarchical:
    """What `to_code` took."""
    return code == -1 if code < 1 else code


def grid_of(hierarchical: Hierarchical, first: Counts) -> Counts | None:
    """The ranks' numbers, shape (hosts, ranks of a host); None where each rank is a host of its own.

    first: by rank, Horovod's number of the first rank of its host.
    Raises PluginError where hosts have different numbers of ranks.
    """
    ranks = np.arange(len(first))
    if hierarchical is not True:
        first = ranks // hierarchical
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    sizes = np.diff(starts, append=len(first))
    if (sizes != (sizes[0] if hierarchical is True else hierarchical)).any():
        raise PluginError(UNEVEN.format(hierarchical=hierarchical, sizes=sizes.tolist()))
    return None if sizes[0] == 1 else ranks.reshape(-1, sizes[0])


def may_add_process_sets(hvd: Any, process_set: Any) -> bool:
    """Whether this rank's Horovod was started so, and all ranks of the job are there."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1" and process_set.size() == hvd.size()


def process_sets(hvd: Any, wanted: Iterable[Counts], may_add: bool) -> dict[tuple[int, ...], Any]:
    """Horovod's process sets of several ranks, by these: those that there are, and new ones.

    may_add: whether all ranks may; then it is called on all together. Raises PluginError where they may not.
    """
    known = {tuple(ranks): number for number, ranks in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()}
    needed = dict.fromkeys(tuple(ranks.tolist()) for ranks in wanted if len(ranks) > 1)
    missing = [list(ranks) for ranks in needed if ranks not in known]
    if missing and not may_add:
        raise PluginError(NO_SETS.format(missing=missing))
    return {ranks: _set_of(hvd, ranks, known[ranks]) if ranks in known else hvd.add_process_set(list(ranks))
            for ranks in needed}


def _set_of(hvd: Any, ranks: tuple[int, ...], number: int) -> Any:
    found = hvd.ProcessSet(list(ranks))
    found.process_set_id = number
    return found


def groups(grid: Counts, rank: int, join: Join) -> tuple[Transport, Transport]:
    """The transports across hosts, among the ranks that have the same place on each, and within this rank's host."""
    host, local = (int(place) for place in np.argwhere(grid == rank)[0])
    across, within = (join(members) if len(members) > 1 else AloneTransport()
                      for members in (grid[:, local], grid[host]))
    return across, within
