"""Deep Gradient Compression's momentum correction with masking (Lin et al., ICLR 2018), to compare with.

For ranks that are threads. Every rank has momentum of its own, u = m u + g, and what it has not sent is v = v + u.
The top k of v are gathered from all ranks and summed; where they were, u and v become zero.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.local_top_k import top_k
from horovod_oktopk.transport.base import Transport
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.vectors.sparse import SparseVector


@dataclass(frozen=True)
class MomentumCorrection:
    """density: fraction of the elements that each rank sends. momentum: m, which the optimizer then must not have."""

    density: float
    momentum: float


class MomentumCorrectedOptimizer:
    """One rank's end. An index and a value are sent as a word each."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter],
                 options: MomentumCorrection, transport: Transport) -> None:
        self.optimizer = optimizer
        self._parameters, self._momentum = parameters, np.float32(options.momentum)
        self._transport = CountingTransport(transport)
        n = sum(p.numel() for p in parameters)
        self._u, self._v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self._report = StepReport(step=0, n=n, k=0, phases={})
        self.set_density(options.density)
        self._density = options.density

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        """The optimizer's, with the mean over ranks as its gradient."""
        gradient = torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None]).numpy()
        self._u = self._momentum * self._u + gradient
        self._v += self._u
        selected = top_k(SparseVector(np.arange(len(gradient)), self._v), self._k)
        self._u[selected.indices] = self._v[selected.indices] = 0
        mean = torch.from_numpy(self._sum_of_all(selected) / np.float32(self._transport.size))
        for p, part in zip(self._parameters, mean.split([p.numel() for p in self._parameters]), strict=True):
            p.grad = part.view_as(p)
        self.optimizer.step()

    def _sum_of_all(self, selected: SparseVector) -> NDArray[np.float32]:
        self._transport.reset()
        message = np.concatenate([selected.indices.astype(np.int32).view(np.uint8), selected.values.view(np.uint8)])
        lengths = np.full(self._transport.size, len(message))
        total = np.zeros(len(self._v), np.float32)
        for each in self._transport.allgatherv(message, lengths):
            indices, values = np.split(each, 2)
            total[indices.view(np.int32)] += values.view(np.float32)
        self._report.phases = self._transport.phases
        return total

    def report(self) -> StepReport:
        return self._report

    def set_density(self, density: float | None) -> None:
        self._k = max(1, round((density or self._density) * len(self._v)))

    def shared(self) -> AbstractContextManager[None]:
        """The model holds nothing else."""
        return nullcontext()
