"""One rank of a job in which the last rank is killed at step 3, after its backward pass."""

from __future__ import annotations

import os
import signal

import horovod.torch as hvd
import torch

from horovod_oktopk.torch import OkTopk
from tests.say import say


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                         compression=OkTopk(density=0.1), named_parameters=model.named_parameters())
    for step in range(1_000_000):
        optimizer.zero_grad()
        if step == 3:
            say(f"rank {hvd.rank()} has reached step 3")
        loss = model(torch.randn(4, 30)).sum()
        loss.backward()
        if step == 3 and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


if __name__ == "__main__":
    main()
