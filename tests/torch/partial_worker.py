"""One rank of a job of partial rounds, which ends as the argument says.

killed: the last rank dies at its third step. shutdown, unsynchronized: all ranks come to their end after different
numbers of steps, with rounds pending; they call hvd.shutdown(), or do not. ending: the last rank ends while the
others synchronize their replicas and train on.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk.torch import Dense, Partial, synchronize_replicas
from horovod_oktopk.torch_base.registry import run_of
from tests.say import say


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    how, rank, is_last = sys.argv[1], hvd.rank(), hvd.rank() == hvd.size() - 1
    model = torch.nn.Linear(30, 30)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                         named_parameters=model.named_parameters(),
                                         compression=Partial(Dense, policy="solo"))
    steps = {"shutdown": 10 + 10 * rank, "unsynchronized": 10 + 10 * rank, "ending": 10 if is_last else 1_000_000}
    for step in range(steps.get(how, 1_000_000)):
        optimizer.zero_grad()
        if step == 3:
            hvd.barrier()  # so that every rank has come so far
            say(f"rank {rank} has reached step 3")
            if is_last and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()
        if how == "ending" and step == 20:
            synchronize_replicas(optimizer)
    if how == "shutdown":
        hvd.shutdown()
        kept = run_of(optimizer).mode.read_residual()
        say(f"rank {rank} keeps {np.count_nonzero(kept)} elements that were in no round")
    say(f"rank {rank} has come to its end")


if __name__ == "__main__":
    main()
