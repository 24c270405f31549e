"""The ranks of a job in which each host is one worker, and divides its elements among its ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..phases.link import Link
from ..transport.base import Counts
from ..transport.collectives import AloneTransport
from ..transport.connect import Connection
from ..transport.counting import CountingTransport
from ..vectors.sparse import SparseVector, concatenate
from ..vectors.wire import Extent, WireCodec


@dataclass(frozen=True)
class Hosts:
    """One rank's place. Each rank of a host holds a slice of the host's elements.

    `within` connects the ranks of this host, `across` those with the same slice on all hosts, one of each host.
    """

    within: CountingTransport
    across: CountingTransport

    def bounds(self, n: int) -> Counts:
        """Return the bounds of the slices of n elements: offsets from 0 to n, shape (ranks of a host + 1,)."""
        return n * np.arange(self.within.size + 1) // self.within.size

    def slice_of(self, n: int) -> slice:
        """Return this rank's slice of n elements."""
        return slice(*self.bounds(n)[self.within.rank:self.within.rank + 2].tolist())

    def gather(self, own: SparseVector, n: int) -> SparseVector:
        """Return the vector of n elements of which each rank of the host has its slice. Collective on the host.

        The indices of `own` count from the beginning of the slice.
        """
        link, bounds = Link(self.within, WireCodec(own.values.dtype)), self.bounds(n).tolist()
        with self.within.phase("host_gather"):
            lengths = self.within.allgather(np.array([len(own)]))[:, 0].tolist()
            extents = [Extent(*each) for each in zip(lengths, bounds, bounds[1:], strict=False)]
            parts = link.allgatherv(own.shifted(bounds[self.within.rank]), list(enumerate(extents)))
            return concatenate(parts, own.values.dtype)


def hosts_of(connection: Connection) -> Hosts | None:
    """Connect the ranks of this host, and those with the same slice; None if each rank is a worker. Collective.

    All their messages are counted with those to all ranks.
    """
    everyone, grid = connection.transport, connection.grid
    if grid is None:
        return None
    host, local = np.argwhere(grid == everyone.rank)[0]
    across, within = (CountingTransport(connection.join(members) if len(members) > 1 else AloneTransport(),
                                        everyone.log) for members in (grid[:, local], grid[host]))
    return Hosts(within, across)
