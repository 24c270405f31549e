"""One worker of an elastic job; see tests.elastic."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters, step_report
from tests.elastic import report, take_steps


def gradient(step: int, rank: int) -> torch.Tensor:
    """Return integers, so that sums are exact."""
    return torch.randint(-9, 10, (200,), generator=torch.Generator().manual_seed(100 * step + rank)).float()


def residual(optimizer: torch.optim.Optimizer) -> list[float]:
    return optimizer.state_dict()["horovod_oktopk"][0]["residual"].tolist()


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(120), torch.zeros(80)])
    compression = (StepAhead(OkTopk(density=0.05)) if "step_ahead" in sys.argv
                   else OkTopk(density=0.05))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum,
                                         named_parameters=model.named_parameters(), compression=compression)

    def take_step(step: int) -> None:
        optimizer.zero_grad()
        (torch.cat(list(model)) * gradient(step, hvd.rank())).sum().backward()
        optimizer.step()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        take_steps(hvd, state, take_step, lambda: residual(optimizer))

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    with shared_parameters(optimizer):
        weight = torch.cat(list(model)).detach()
    report(hvd, step_report(optimizer).step, residual(optimizer), weight, gradient)


if __name__ == "__main__":
    main()
