"""One worker of an elastic job: at step 5 the worker of one host kills itself; the rest go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters, step_report

STEPS = 12
VICTIM = "127.0.0.1"
"""The host with one worker: Horovod lets no host of a dead worker take part again."""


def residual_sum(optimizer: torch.optim.Optimizer) -> float:
    records = optimizer.state_dict()["horovod_oktopk"]
    return float(records[0]["residual"].double().sum()) if records else 0.0


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
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if (folder / "killed").exists() and hvd.size() < 3:  # wait for the newcomer
                time.sleep(0.1)
                state.commit()
                continue
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
            (torch.cat(list(model)) * torch.randint(-9, 10, (200,), generator=generator)).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    with shared_parameters(optimizer):
        weight = torch.cat(list(model)).detach()
    mine = {"size": hvd.size(), "step": step_report(optimizer).step, "residual": residual_sum(optimizer),
            "weight": np.asarray(weight).tobytes().hex(), "sum": float(weight.double().sum())}
    everyone = hvd.allgather_object(mine)
    if hvd.rank() == 0:
        (folder / "outcome.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
