"""What the methods share that the package does not have: they find a mean of the ranks' gradients, for any optimizer.

For ranks that are threads, and to compare with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.transport.base import Transport
from horovod_oktopk.transport.counting import CountingTransport

Floats = NDArray[np.floating[Any]]


class AveragingOptimizer(ABC):
    """One rank's end. Bytes are counted by the transport: an allreduce of d words as 2d(P-1)/P of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], transport: Transport,
                 ) -> None:
        self.optimizer = optimizer
        self._parameters = parameters
        self._transport = CountingTransport(transport)
        self._report = StepReport(step=0, n=sum(p.numel() for p in parameters), k=0, phases={})

    @abstractmethod
    def _mean(self, gradients: list[Floats]) -> list[Floats]:
        """What all ranks take for the mean of their gradients, of the parameters in their order."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        """The optimizer's, with the mean over ranks as its gradient."""
        self._transport.reset()
        means = self._mean([p.grad.numpy() for p in self._parameters if p.grad is not None])
        self._report.phases = self._transport.phases
        for p, mean in zip(self._parameters, means, strict=True):
            p.grad = torch.from_numpy(mean.reshape(p.shape))
        self.optimizer.step()

    def report(self) -> StepReport:
        return self._report

    def set_density(self, density: float | None) -> None:
        raise ValueError(f"{type(self).__name__} has no density; got {density}")

    def shared(self) -> AbstractContextManager[None]:
        """The model holds nothing else."""
        return nullcontext()
