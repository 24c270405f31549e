"""One rank of peers.py: passes over a model's data by several methods, under torch.distributed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import launch
from benchmarks.accuracy.peers_ranks import PEERS, LocalSGD, PeerRanks
from benchmarks.data.models import WORKLOADS, Workload

AT_ONCE: dict[str, Callable[..., Any]] = {
    **{name: make for name, make in PEERS.items() if name not in ("PowerSGD, rank 1", "PowerSGD, rank 4")},
    "LocalSGD, 4 steps": partial(LocalSGD, start=1)}
"""Methods that send in the first passes what they send later, and those made so."""


def measure(model: str, warm_up: int, passes: int, address: str) -> list[dict[str, Any]]:
    """Return for each method the mean seconds of a pass, of the slowest rank in each, and bytes.

    Rank 0 is at the address.
    """
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    dist.init_process_group("gloo", rank=launch.rank(), world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    torch.set_num_threads(1)
    found = []
    for peer in AT_ONCE:
        take = make_pass(WORKLOADS[model], peer)
        timed = [take() for _ in range(warm_up + passes)][warm_up:]
        seconds = torch.tensor([each for each, _ in timed])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append({"peer": peer, "seconds": float(seconds.mean()), "each": seconds.tolist(),
                      "bytes_sent": statistics.mean(sent for _, sent in timed)})
    return found


def make_pass(workload: Workload, peer: str) -> Callable[[], tuple[float, float]]:
    """Return a pass of a new model, which returns its seconds and the bytes sent."""
    torch.manual_seed(1)
    model = PeerRanks(peer).wrapped(workload.make())
    distributed = AT_ONCE[peer](workload.optimizer(model.parameters()), model)
    batches = workload.batches(workload.batch, dist.get_rank())

    def take() -> tuple[float, float]:
        batch = next(batches)
        dist.barrier()
        start = time.perf_counter()
        distributed.zero_grad()
        workload.loss(model, batch).backward()
        distributed.step()
        seconds = time.perf_counter() - start
        report = distributed.report()
        return seconds, 0.0 if report is None else float(report.bytes_sent)

    return take


if __name__ == "__main__":
    launch.run_rank(measure)
