"""One rank of a job in which the last rank goes wrong at step 3; the argument says how."""

from __future__ import annotations

import os
import signal
import sys

import horovod.torch as hvd
import torch

from horovod_oktopk.torch import OkTopk


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(30, 30)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=OkTopk(density=0.1),
                                         named_parameters=model.named_parameters())
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(torch.randn(4, 30)).sum().backward()
        if step == 3:
            print(f"rank {hvd.rank()} has reached step 3", flush=True)
        if step == 3 and hvd.rank() == hvd.size() - 1:
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this rank raises")
        optimizer.step()


if __name__ == "__main__":
    main()
