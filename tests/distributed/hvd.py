"""The names that scenarios use of Horovod, served by torch.distributed and our optimizers for it.

A scenario that uses any other name, or an argument that is Horovod's alone, is skipped with that reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from horovod_oktopk import distributed
from tests.scenarios.common import Skipped

SERVED = {"named_parameters", "compression", "sparse_as_dense"}


class ProcessSet:
    """Some of the ranks; `group` is there once torch.distributed has been started."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.group = list(ranks), None

    def included(self) -> bool:
        return dist.get_rank() in self.ranks

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(dist.get_rank())


class Hvd:
    Average, Sum = dist.ReduceOp.AVG, dist.ReduceOp.SUM
    Adasum, Min, Product = dist.ReduceOp.BXOR, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT
    """Sums that are refused."""
    Compression = SimpleNamespace(none="a dense sum")
    ProcessSet = ProcessSet
    rank, size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)

    def __getattr__(self, name: str) -> Any:
        raise Skipped(f"needs hvd.{name}")

    def init(self, process_sets: Sequence[ProcessSet] = ()) -> None:
        dist.init_process_group("gloo")
        for each in process_sets:
            each.group = dist.new_group(each.ranks)

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def local_size(self) -> int:
        return int(os.environ["LOCAL_WORLD_SIZE"])

    def mpi_enabled(self) -> bool:
        return False

    def allgather_object(self, value: Any, name: str = "") -> list[Any]:
        everyone: list[Any] = [None] * self.size()
        dist.all_gather_object(everyone, value)
        return everyone

    def broadcast_object(self, value: Any, root_rank: int = 0, name: str = "") -> Any:
        return self.allgather_object(value)[root_rank]

    def broadcast_parameters(self, params: Any, root_rank: int) -> None:
        distributed.broadcast_parameters(params, root_rank)

    def broadcast_optimizer_state(self, optimizer: Any, root_rank: int) -> None:
        distributed.broadcast_optimizer_state(optimizer, root_rank)

    def DistributedOptimizer(self, optimizer: torch.optim.Optimizer, *, op: Any = Average, process_set: Any = None,
                             **arguments: Any) -> Any:
        if others := sorted({*arguments} - SERVED):
            raise Skipped(f"needs Horovod's {', '.join(others)}")
        group = process_set and process_set.group
        if arguments.get("compression") is self.Compression.none:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                optimizer.register_step_pre_hook(lambda *_: reduce_whole(optimizer, op, group))
            return optimizer
        return distributed.DistributedOptimizer(optimizer, op=op, broadcast=False, process_group=group, **arguments)


def reduce_whole(optimizer: torch.optim.Optimizer, op: Any, group: Any) -> None:
    """Reduce gradients by torch.distributed's own allreduce."""
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        dist.all_reduce(p.grad, group=group)
        if op == dist.ReduceOp.AVG:
            p.grad /= dist.get_world_size(group)


hvd = Hvd()
