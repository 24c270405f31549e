"""The core alone over torch.distributed. One rank of a job, under torchrun:

    torchrun --nproc-per-node P -m tests.core.distributed NAME...

It prints the digests of these cases, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from horovod_oktopk.distributed.groups import GroupRanks
from tests.core.digests import CASES, digest_on
from tests.core.driver import Kind
from tests.core.world import Hvd, ProcessSet
from tests.say import say


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
    def make_ranks(self, _hvd: Hvd, process_set: ProcessSet, channel: int) -> GroupRanks:
        ranks = GroupRanks(None, own_channel=bool(channel))
        ranks.process_set = process_set  # of which the driver asks
        return ranks


def main(names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    kind = DistributedKind(DistributedHvd())
    found = {name: digest_on(kind, CASES[name]) for name in names}
    kind.end()
    if dist.get_rank() == 0:
        say(f"digests: {json.dumps(found)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
