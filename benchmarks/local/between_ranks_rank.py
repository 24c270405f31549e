"""One rank of between_ranks.py: a job of Horovod that starts torch.distributed, too."""

from __future__ import annotations

import os
import socket
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist

from benchmarks import launch
from horovod_oktopk import distributed
from horovod_oktopk.torch import OkTopk, step_report

LOCAL = ("accumulate", "select", "write_back")
"""Phases in which nothing is sent."""


def measure(network: str, n: int, density: float, steps: int, warm_up: int) -> dict[str, Any]:
    """Return the seconds between ranks of each step, by library; on each rank the same gradients for both."""
    torch.set_num_threads(1)
    hvd.init()
    start_torch_distributed()
    options, gradient = OkTopk(density=density), torch.randn(n, generator=torch.Generator().manual_seed(hvd.rank()))
    seconds: dict[str, list[float]] = {"horovod": [], "distributed": []}
    optimizers = {name: torch.optim.SGD([torch.nn.Parameter(torch.zeros(n))], lr=0.1) for name in seconds}
    hvd.DistributedOptimizer(optimizers["horovod"], compression=options)
    distributed.DistributedOptimizer(optimizers["distributed"], compression=options)
    for step in range(warm_up + steps):
        for name, optimizer in optimizers.items():
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = gradient * (1 + 0.01 * step)
            hvd.allreduce(torch.zeros(1), name="together")
            optimizer.step()
            report = step_report(optimizer)
            assert report is not None
            if step >= warm_up:
                seconds[name].append(sum(traffic.seconds for phase, traffic in report.phases.items()
                                         if phase not in LOCAL))
    return {"network": network, "n": n, "ranks": hvd.size(), "seconds": seconds}


def start_torch_distributed() -> None:
    """Start torch.distributed among Horovod's ranks, at a port that rank 0 finds free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = hvd.broadcast_object(free.getsockname()[1], root_rank=0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())


if __name__ == "__main__":
    launch.run_rank(measure)
