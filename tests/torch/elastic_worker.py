"""One worker of an elastic job: at step 5 the worker of one host kills itself; the rest go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters, step_report

STEPS = 12
VICTIM = "127.0.0.1"
"""The host with one worker: Horovod lets no host of a dead worker take part again."""


def gradient(step: int, rank: int) -> torch.Tensor:
    """Integers, so that sums are exact."""
    return torch.randint(-9, 10, (200,), generator=torch.Generator().manual_seed(100 * step + rank)).float()


def residual(optimizer: torch.optim.Optimizer) -> list[float]:
    return optimizer.state_dict()["horovod_oktopk"][0]["residual"].tolist()


def main() -> None:
    folder = Path(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(120), torch.zeros(80)])
    compression = (StepAhead(OkTopk(density=0.05)) if "step_ahead" in sys.argv
                   else OkTopk(density=0.05))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum,
                                         named_parameters=model.named_parameters(), compression=compression)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < STEPS:
            if state.step == 5 and os.environ["HOROVOD_HOSTNAME"] == VICTIM and not (folder / "killed").exists():
                (folder / "killed").write_text(json.dumps(residual(optimizer)))
                os.kill(os.getpid(), signal.SIGKILL)
            if (folder / "killed").exists() and hvd.size() < 3:  # wait for the newcomer
                time.sleep(0.1)
                state.commit()
                continue
            optimizer.zero_grad()
            (torch.cat(list(model)) * gradient(state.step, hvd.rank())).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    with shared_parameters(optimizer):
        weight = torch.cat(list(model)).detach()
    computed = sum(gradient(step, rank) for step in range(STEPS) for rank in range(3))
    mine = {"size": hvd.size(), "step": step_report(optimizer).step, "residual": residual(optimizer),
            "weight": weight.tolist(), "computed": computed.tolist()}
    everyone = hvd.allgather_object(mine)
    if hvd.rank() == 0:
        (folder / "outcome.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
