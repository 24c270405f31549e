"""The protocol Ranks over torch.distributed: a job without Horovod. One rank of it, under torchrun:

    torchrun --nproc-per-node P -m tests.core.distributed NAME...

It prints the digests of these cases, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from horovod_oktopk.transport.base import Counts, Membership, NoMPI, Ranks
from horovod_oktopk.transport.collectives import CollectivesTransport
from tests.core.digests import CASES, digest_on
from tests.core.driver import Kind
from tests.core.world import Hvd, ProcessSet


class GroupTransport(CollectivesTransport):
    """The collectives of one process group of Gloo."""

    concurrent = True

    def __init__(self, group: Any) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group

    def _allgather(self, values: np.ndarray) -> np.ndarray:
        lengths = self._gathered(np.array([len(values)]), 1)
        rows = self._gathered(values, int(max(row[0] for row in lengths)))
        return np.concatenate([row[:length[0]] for row, length in zip(rows, lengths, strict=True)])

    def _allreduce(self, values: np.ndarray) -> np.ndarray:
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total, group=self._group)
        return total.numpy()

    def _alltoall(self, values: np.ndarray, splits: np.ndarray) -> np.ndarray:
        came = np.stack(self._gathered(splits.astype(np.int64), self.size))[:, self.rank]
        received = torch.empty(int(came.sum()), dtype=torch.from_numpy(values[:0]).dtype)
        dist.all_to_all_single(received, torch.from_numpy(values.copy()), came.tolist(), splits.tolist(),
                               group=self._group)
        return received.numpy()

    def _gathered(self, row: np.ndarray, length: int) -> list[np.ndarray]:
        padded = torch.from_numpy(np.concatenate([row, np.zeros(length - len(row), row.dtype)]))
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self._group)
        return [each.numpy() for each in rows]


class DistributedRanks(Ranks):
    """All ranks of the job. A channel has a group of its own, made on all ranks together."""

    yield_cpu, takes_part, base = False, True, dist

    def __init__(self, hvd: Hvd, process_set: ProcessSet, channel: int) -> None:
        self.hvd, self.process_set, self.channel = hvd, process_set, channel
        self._groups: dict[Any, Any] = {}

    def membership(self) -> Membership:
        return Membership(dist.get_rank(), dist.get_world_size(), 0)

    def host(self) -> tuple[int, int | None]:
        return 0, dist.get_world_size()

    def divide(self, groups: Iterable[Counts]) -> None:
        for members in groups:
            self._groups[tuple(members.tolist())] = dist.new_group(members.tolist())

    def transport(self, channel: int | str, members: Counts | None = None) -> CollectivesTransport:
        if members is not None:
            return GroupTransport(self._groups[tuple(members.tolist())])
        if channel not in self._groups:
            self._groups[channel] = dist.new_group()
        return GroupTransport(self._groups[channel])

    def mpi_rank(self) -> NoMPI:
        return NoMPI("there is none", warns=False)


class DistributedHvd(Hvd):
    """The names that scenarios use of Horovod, over torch.distributed."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank, dist.get_world_size
        self.local_rank, self.local_size = self.rank, self.size

    def allgather_object(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size()
        dist.all_gather_object(everyone, value)
        return everyone


class DistributedKind(Kind):
    make_ranks = DistributedRanks


def main(names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    kind = DistributedKind(DistributedHvd())
    found = {name: digest_on(kind, CASES[name]) for name in names}
    kind.end()
    if dist.get_rank() == 0:
        print("digests:", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
