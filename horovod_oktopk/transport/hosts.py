"""Hosts as workers: the ranks that share one."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from ..errors import PluginError
from .alone import AloneTransport
from .base import Counts, Hierarchical, Transport
from .ranks import Ranks

Join = Callable[[Counts], Transport]
"""A function that makes the transport among some of the ranks, given by their numbers. Collective on these."""

UNEVEN = ("hierarchical={hierarchical} needs hosts with equally many ranks, which follow one another (as horovodrun "
          "and mpirun place them); got {sizes} ranks on the hosts, in the ranks' order. Start as many ranks on every "
          "host, or leave hierarchical out")
NO_ELASTIC = ("hierarchical cannot be used in an elastic job: with process sets, Horovod ends all processes when one "
              "of them fails (its issue 4021). Leave it out")
NEEDS_ALL_RANKS = ("StepAhead with hierarchical=True needs all ranks of the job: give the number of ranks of a host "
                   "instead, or no process set")


def check_not_elastic() -> None:
    """Raise PluginError in an elastic job; all ranks know that the job is elastic."""
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise PluginError(NO_ELASTIC)


def to_code(hierarchical: Hierarchical) -> int:
    """Return the option as a number: 0 for flat, -1 for hosts as they are."""
    return -1 if hierarchical is True else int(hierarchical)


def from_code(code: int) -> Hierarchical:
    """Return the option that `to_code` was given."""
    return code == -1 if code < 1 else code


def ranks_per_host(ranks: Ranks, hierarchical: Hierarchical) -> int:
    """Return how many ranks a worker has; `connect` checks that the job can be divided like this.

    Raise PluginError if hierarchical is True, and the ranks are a part of the job.
    """
    if ranks.membership().size == 1 or not hierarchical:
        return 1
    if hierarchical is not True:
        return int(hierarchical)
    size = ranks.host().size
    if size is None:
        raise PluginError(NEEDS_ALL_RANKS)
    return size


def grid_of(hierarchical: Hierarchical, first: Counts) -> Counts | None:
    """Return the ranks' numbers, shape (hosts, ranks of a host); None if each rank is a host of its own.

    first: by rank, the number of the first rank of its host.
    Raise PluginError if hosts have different numbers of ranks.
    """
    ranks = np.arange(len(first))
    if hierarchical is not True:
        first = ranks // hierarchical
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    sizes = np.diff(starts, append=len(first))
    if (sizes != (sizes[0] if hierarchical is True else hierarchical)).any():
        raise PluginError(UNEVEN.format(hierarchical=hierarchical, sizes=sizes.tolist()))
    return None if sizes[0] == 1 else ranks.reshape(-1, sizes[0])


def groups(grid: Counts, rank: int, join: Join) -> tuple[Transport, Transport]:
    """Return the transports across hosts, among the ranks at the same place on each, and within this rank's host."""
    host, local = (int(place) for place in np.argwhere(grid == rank)[0])
    across, within = (join(members) if len(members) > 1 else AloneTransport()
                      for members in (grid[:, local], grid[host]))
    return across, within
