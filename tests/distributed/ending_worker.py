"""One rank of a job of torchrun whose last rank goes wrong: -m tests.distributed.ending_worker HOW FOLDER MODE.

The others print what they are told. With "restarting", torchrun starts all anew, and they go on from the saved state.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from horovod_oktopk import OkTopkError
from horovod_oktopk.distributed import DistributedOptimizer, OkTopk, StepAhead, gather_state_dict, shared_parameters
from tests.say import say

STEPS, WRONG = 12, 6


def go_wrong(how: str) -> None:
    if how == "raising" or (how == "restarting" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        raise ValueError("the file is gone")
    if how == "stalling":
        time.sleep(6)
    if how == "destroying":
        dist.destroy_process_group()


def main() -> None:
    how, folder, mode = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, last, path = dist.get_rank(), dist.get_world_size() - 1, Path(folder, "state.pt")
    torch.manual_seed(3)
    model = torch.nn.Linear(30, 40)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                     StepAhead(OkTopk(density=0.1)) if mode == "step_ahead" else OkTopk(density=0.1))
    first = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        with shared_parameters(optimizer):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    try:
        for step in range(first, STEPS - (how == "fewer" and rank == last) * WRONG):
            if step == WRONG and rank == last:
                go_wrong(how)
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
            if step == WRONG - 2 and how in ("restarting", "well"):
                with shared_parameters(optimizer):
                    state = {"model": model.state_dict(), "optimizer": gather_state_dict(optimizer), "step": step + 1}
                    if rank == 0:
                        torch.save(state, path)
                dist.barrier()
        with shared_parameters(optimizer):
            values = torch.cat([p.detach().view(-1) for p in model.parameters()])
    except OkTopkError as error:
        say(f"rank {rank} was told: {type(error).__name__}: {error}")
        raise
    if how == "fewer" and rank == last:
        return
    say(f"rank {rank} digest: {hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
