"""PowerSGD (Vogels et al., NeurIPS 2019), to compare with: gradients as products of two thin matrices.

For ranks that are threads. A gradient of shape (a, ...) is taken as a matrix M of a rows, as PyTorch's hook for
DistributedDataParallel takes it. One step of a power iteration from the last step's Q finds P = M Q and, of P
orthonormal, Q = Mᵀ P; both are averaged over the ranks, and P Qᵀ is what all take for the mean. What a rank's M has
more than that is added to its next gradient. Vectors, and what is no smaller as two matrices, are sent whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.accuracy.averaging import AveragingOptimizer, Floats
from horovod_oktopk.transport.base import Transport

SEED = 1
"""Of the first Q, which is the same on all ranks."""


@dataclass(frozen=True)
class PowerSGD:
    """rank: columns of P and Q."""

    rank: int


class PowerSGDOptimizer(AveragingOptimizer):
    """One rank's end; compressed from the first step on."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], options: PowerSGD,
                 transport: Transport) -> None:
        super().__init__(optimizer, parameters, transport)
        random = np.random.default_rng(SEED)
        shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in parameters]
        self._q = {place: random.standard_normal((columns, options.rank), np.float32)
                   for place, (rows, columns) in enumerate(shapes)
                   if (rows + columns) * options.rank < rows * columns}
        self._errors: dict[int, Floats] = {place: np.zeros(shapes[place], np.float32) for place in self._q}

    def _mean(self, gradients: list[Floats]) -> list[Floats]:
        matrices = {place: gradients[place].reshape(error.shape) + error for place, error in self._errors.items()}
        whole = {place: each for place, each in enumerate(gradients) if place not in matrices}
        means = self._averaged(whole)
        products = self._averaged({place: matrix @ self._q[place] for place, matrix in matrices.items()})
        bases = {place: np.linalg.qr(product)[0] for place, product in products.items()}
        self._q = self._averaged({place: matrix.T @ bases[place] for place, matrix in matrices.items()})
        for place, matrix in matrices.items():
            means[place] = bases[place] @ self._q[place].T
            self._errors[place] = matrix - means[place]
        return [means[place] for place in range(len(gradients))]

    def _averaged(self, arrays: dict[int, Floats]) -> dict[int, Floats]:
        """Over the ranks, in one allreduce."""
        if not arrays:
            return {}
        total = self._transport.allreduce(np.concatenate([each.ravel() for each in arrays.values()]))
        parts = np.split(total / np.float32(self._transport.size), np.cumsum([each.size for each in arrays.values()]))
        return {place: part.reshape(each.shape) for (place, each), part in zip(arrays.items(), parts, strict=False)}
