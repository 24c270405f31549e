"""Deep Gradient Compression's momentum correction with masking (Lin et al., ICLR 2018), to compare with.

For ranks that are threads. Every rank has momentum of its own, u = m u + g, and what it has not sent is v = v + u.
The top k of v are gathered from all ranks and summed; where they were, u and v become zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.accuracy.averaging import AveragingOptimizer, Floats
from horovod_oktopk.selection.local_top_k import top_k
from horovod_oktopk.transport.base import Transport
from horovod_oktopk.vectors.sparse import SparseVector


@dataclass(frozen=True)
class MomentumCorrection:
    """density: fraction of the elements that each rank sends. momentum: m, which the optimizer then must not have."""

    density: float
    momentum: float


class MomentumCorrectedOptimizer(AveragingOptimizer):
    """One rank's end. An index and a value are sent as a word each."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter],
                 options: MomentumCorrection, transport: Transport) -> None:
        super().__init__(optimizer, parameters, transport)
        self._momentum, self._density = np.float32(options.momentum), options.density
        self._cuts = np.cumsum([p.numel() for p in parameters])[:-1]
        self._u, self._v = (np.zeros(self._report.n, np.float32) for _ in range(2))
        self.set_density(None)

    def _mean(self, gradients: list[Floats]) -> list[Floats]:
        self._u = self._momentum * self._u + np.concatenate([each.ravel() for each in gradients])
        self._v += self._u
        selected = top_k(SparseVector(np.arange(len(self._v)), self._v), self._k)
        self._u[selected.indices] = self._v[selected.indices] = 0
        return np.split(self._sum_of_all(selected) / np.float32(self._transport.size), self._cuts)

    def _sum_of_all(self, selected: SparseVector) -> NDArray[np.float32]:
        message = np.concatenate([selected.indices.astype(np.int32).view(np.uint8), selected.values.view(np.uint8)])
        lengths = np.full(self._transport.size, len(message))
        total = np.zeros(len(self._v), np.float32)
        for each in self._transport.allgatherv(message, lengths):
            indices, values = np.split(each, 2)
            total[indices.view(np.int32)] += values.view(np.float32)
        return total

    def set_density(self, density: float | None) -> None:
        self._k = max(1, round((density or self._density) * len(self._v)))
