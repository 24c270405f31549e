"""Ranks that are threads, in place of those of Horovod's process set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_oktopk.transport.counting import CountingTransport, on_hosts
from tests.support.threads import ThreadTransport


@dataclass
class ThreadNetwork:
    """The ranks of a ThreadWorld, as Network has those of a process set."""

    transport: ThreadTransport
    resets: int = 0
    channel: int = 0

    @property
    def hvd(self) -> ThreadTransport:
        """Stand for Horovod: one object on each rank."""
        return self.transport

    def barrier(self) -> None:
        self.transport.allgather(np.zeros(1, np.int64))

    def membership(self) -> tuple[int, int, int]:
        return self.transport.rank, self.transport.size, self.resets

    def connect(self, _choice: str, hierarchical: bool | int = False) -> CountingTransport:
        if hierarchical is False:
            return CountingTransport(self.transport)
        grid = np.arange(self.transport.size).reshape(-1, hierarchical)
        return on_hosts(self.transport, *self.transport.groups(hierarchical), grid)

    def ranks_per_host(self, hierarchical: bool | int) -> int:
        return int(hierarchical or 1)
