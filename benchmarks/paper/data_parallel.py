"""Data-parallel training in one process: one model for all ranks, which reduce their gradients as threads."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.data.characters import CharacterModel, load_characters, sequences
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.local_top_k import top_k
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.vectors.sparse import SparseVector
from tests.support.threads import ThreadTransport, run_ranks

Gradients = list[NDArray[np.float32]]
"""One of n elements for each rank."""


class Training:
    """One model for all ranks, with Adam; every step takes a batch for each rank."""

    def __init__(self, arguments: argparse.Namespace, ranks: int) -> None:
        torch.manual_seed(arguments.seed)
        text, characters = load_characters()
        self._sequences = sequences(text, arguments.sequence)
        self.model = CharacterModel(characters, arguments.hidden)
        self.n = sum(parameter.numel() for parameter in self.model.parameters())
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=arguments.lr)
        self._generator = torch.Generator().manual_seed(arguments.seed)
        self._ranks, self._batch = ranks, arguments.batch_size
        self.losses: list[float] = []

    def gradients(self) -> Gradients:
        """Every rank's, one after the other."""
        chosen = torch.randint(len(self._sequences), (self._ranks, self._batch), generator=self._generator)
        found, losses = [], []
        for rows in chosen:
            self.model.zero_grad()
            loss = self.model.loss(self._sequences[rows])
            loss.backward()
            losses.append(loss.item())
            parts = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
            found.append(torch.cat(parts).numpy())
        self.losses.append(float(np.mean(losses)))
        return found

    def apply(self, update: SparseVector) -> None:
        """The mean over ranks becomes the gradient of the optimizer's step."""
        dense = np.zeros(self.n, np.float32)
        dense[update.indices] = update.values / self._ranks
        flat = torch.from_numpy(dense)
        parameters = list(self.model.parameters())
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()


@dataclass(frozen=True)
class Outcome:
    """One rank's step. selection: its local top-k."""

    selection: SparseVector
    update: SparseVector
    report: StepReport


class Ranks:
    """An algorithm and an accumulator on each rank, which reduce as threads."""

    def __init__(self, options: Scheme, size: int, n: int) -> None:
        self.k = options.k_of(n)
        self.accumulators = [NumpyAccumulator(n) for _ in range(size)]
        self.algorithms: list[Any] = [options.algorithm() for _ in range(size)]

    def accumulated(self, gradients: Gradients) -> Gradients:
        """acc of every rank, before the step."""
        pairs = zip(self.accumulators, gradients, strict=True)
        return [accumulator.residual + gradient for accumulator, gradient in pairs]

    def reduce(self, gradients: Gradients) -> list[Outcome]:
        """One step, by rank."""
        def program(inner: ThreadTransport) -> Outcome:
            accumulator, transport = self.accumulators[inner.rank], CountingTransport(inner)
            finite = accumulator.accumulate([(0, gradients[inner.rank])])
            result = self.algorithms[inner.rank].reduce(accumulator, self.k, finite, transport)
            assert isinstance(result.update, SparseVector)
            passing = accumulator.select(result.report.local_threshold, accumulator.n)
            assert passing is not None
            accumulator.commit(result.contributed)
            return Outcome(top_k(passing, self.k), result.update, result.report)

        return run_ranks(len(self.accumulators), program, timeout=120.0)
