"""A job whose ranks are threads of this process: what scenarios use of Horovod, and the network of the core."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from horovod_oktopk.reducer.checks import refuse_join
from horovod_oktopk.transport.connect import Network, _joined
from tests.scenarios.common import RANKS, Skipped
from tests.support.threads import ThreadTransport, ThreadWorld, run_ranks


def run(size: int, program: Callable[[Hvd], None]) -> list[str | None]:
    """Runs a program on every rank; by rank, why it was skipped, or None."""
    world = ThreadWorld(size)

    def on_rank(transport: ThreadTransport) -> str | None:
        RANKS.add(threading.get_ident())
        try:
            program(Hvd(world, transport.rank))
        except Skipped as reason:
            return str(reason)
        except BaseException:
            world.abort()
            raise
        finally:
            RANKS.discard(threading.get_ident())
        return None

    return run_ranks(size, on_rank)


class Hvd:
    """One rank's place in the job, with the names that scenarios use of Horovod."""

    Average, Sum, Adasum, Min, Product = "Average", "Sum", "Adasum", "Min", "Product"
    Compression = SimpleNamespace(none="a dense sum")

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank, self.size = lambda: rank, lambda: world.size
        self.local_rank, self.local_size = self.rank, self.size
        self.join = refuse_join(lambda: True, lambda: None)

    def mpi_enabled(self) -> bool:
        return False

    def transport(self, ranks: Sequence[int], name: str) -> ThreadTransport:
        """Among some of the ranks; what they do under another name does not meet it."""
        self._world.check()
        ranks = [int(rank) for rank in ranks]
        return ThreadTransport(self._world.group(f"{name} of {ranks}", len(ranks)), ranks.index(self.rank()))

    def allgather_object(self, value: Any) -> list[Any]:
        self._world.check()
        pickled = self._world.group("objects", self.size()).swap(self.rank(), pickle.dumps(value))
        return [pickle.loads(each) for each in pickled]

    def broadcast_object(self, value: Any, root_rank: int) -> Any:
        return self.allgather_object(value)[root_rank]


@dataclass
class ProcessSet:
    """Some of the ranks."""

    hvd: Hvd
    ranks: list[int]

    def included(self) -> bool:
        return self.hvd.rank() in self.ranks

    def rank(self) -> int:
        return self.ranks.index(self.hvd.rank())

    def size(self) -> int:
        return len(self.ranks)


class ThreadCollectives:
    """What a Network meets by before it has a transport."""

    def __init__(self, process_set: ProcessSet, name: int | str) -> None:
        self._inner = process_set.hvd.transport(process_set.ranks, f"meeting {name}")
        self.rank, self.size, self.concurrent = self._inner.rank, self._inner.size, True

    def allgather(self, values: np.ndarray) -> np.ndarray:
        return self._inner.allgather(values).ravel()


class ThreadNetwork(Network):
    """The ranks of a process set, over memory; hosts are found, and choices compared, as everywhere."""

    def _over_horovod(self, ranks: Any, channel: int, grid: Any, _may_add: bool, route: str) -> Any:
        def join(members: Any) -> ThreadTransport:
            return self.hvd.transport(ranks[members], f"hosts {channel}")

        return _joined(self.hvd.transport(self.process_set.ranks, f"all {channel}"), grid, join, route)

    def dense_sum(self, vector: np.ndarray) -> np.ndarray:
        """The driver's own, as stock; a rank outside the process set has its own vector alone."""
        members = self.process_set
        if not members.included():
            return vector
        return self.hvd.transport(members.ranks, f"dense {self.channel}").allreduce(vector)
