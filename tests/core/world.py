"""A job whose ranks are threads of this process: what scenarios use of Horovod, and the network of the core."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from horovod_oktopk.transport.horovod import refuse_join
from tests.scenarios.common import RANKS, Skipped
from tests.support.ranks import ThreadRanks
from tests.support.threads import ThreadTransport, ThreadWorld, run_ranks


def run(size: int, program: Callable[[Hvd], None]) -> list[str | None]:
    """Run a program on every rank; return by rank why it was skipped, or None."""
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
        """Return a transport among some of the ranks; transports of other names do not meet it."""
        self._world.check()
        return ThreadTransport(self._world, self.rank()).group([int(rank) for rank in ranks], name)

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


class CoreRanks(ThreadRanks):
    """The ranks of a process set, among which each channel has messages of its own."""

    def __init__(self, hvd: Hvd, process_set: ProcessSet, channel: int) -> None:
        self.process_set, self.hvd = process_set, hvd
        everyone = hvd.transport(process_set.ranks, "all") if process_set.included() else None
        super().__init__(everyone, channel, hvd)

    @property
    def takes_part(self) -> bool:
        return self.process_set.included()

    def transport(self, channel: int | str, members: Any = None) -> ThreadTransport:
        ranks = self.process_set.ranks
        return self.hvd.transport(ranks if members is None else [ranks[each] for each in members], f"{channel}")

    def dense_sum(self, vector: np.ndarray) -> np.ndarray:
        """Return the sum as stock would; on a rank outside the process set, its own vector."""
        return self.transport(f"dense {self.channel}").allreduce(vector) if self.takes_part else vector
