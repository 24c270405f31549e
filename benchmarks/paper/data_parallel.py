"""Data-parallel training in one process: one model for all ranks, as replicas are equal; they reduce as threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from benchmarks.data.characters import CharacterModel, load_characters, sequences
from horovod_oktopk.phases.agreement import Attendance
from horovod_oktopk.schemes.algorithm import Memory, Result
from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.schemes.step import reduce
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.threads import ThreadTransport, run_ranks

Vector = NDArray[np.float32]


class Reduced(NamedTuple):
    """One rank's report and result of a step."""

    report: StepReport
    result: Result


class Ranks:
    """A scheme's ranks: an accumulator and a memory each."""

    def __init__(self, options: Scheme, size: int, n: int) -> None:
        self.k = options.k_of(n)
        self.accumulators = [NumpyAccumulator(n) for _ in range(size)]
        self._algorithm, self._memories = options.algorithm(), [Memory()] * size

    def reduce(self, gradients: list[Vector]) -> list[Reduced]:
        """Take one step; return each rank's report and result."""
        def program(inner: ThreadTransport) -> Reduced:
            rank, acc = inner.rank, self.accumulators[inner.rank]
            said = Attendance("", self.k, finite=acc.accumulate([(0, gradients[rank])]))
            outcome = reduce(self._algorithm, acc, said, self._memories[rank], CountingTransport(inner))
            assert outcome.result is not None
            self._memories[rank] = outcome.memory
            acc.commit(outcome.result.contributed, outcome.result.remainder)
            return Reduced(outcome.report, outcome.result)

        return run_ranks(len(self.accumulators), program, timeout=120.0)


@dataclass(frozen=True)
class Step:
    """One step. accumulated: what each rank selects from; results: each rank's; beside: of the other schemes."""

    k: int
    gradients: list[Vector]
    accumulated: list[Vector]
    results: list[Reduced]
    beside: list[list[Reduced]]


def train(options: Scheme, size: int, hidden: int, steps: Iterable[object], *others: Scheme) -> Iterator[Step]:
    """Train an LSTM on characters with Adam, 4 sequences for each rank and step; yield the steps.

    others: schemes that reduce the same gradients, and move no parameter.
    """
    torch.manual_seed(1)
    text, characters = load_characters()
    model, data = CharacterModel(characters, hidden), sequences(text, 64)
    lengths = [each.numel() for each in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), 0.002)
    ranks, *beside = [Ranks(each, size, sum(lengths)) for each in (options, *others)]
    for _ in steps:
        gradients = [gradient(model, data[torch.randint(len(data), (4,))]) for _ in range(size)]
        accumulated = [acc.residual + each for acc, each in zip(ranks.accumulators, gradients, strict=True)]
        results = ranks.reduce(gradients)
        mean = torch.from_numpy(dense(results[0].result.update, sum(lengths)) / size)
        for parameter, part in zip(model.parameters(), mean.split(lengths), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        yield Step(ranks.k, gradients, accumulated, results, [each.reduce(gradients) for each in beside])


def gradient(model: nn.Module, samples: torch.Tensor) -> Vector:
    """Return the gradient of one rank's batch, as a flat vector."""
    loss = functional.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]).numpy()


def dense(update: Any, n: int) -> Vector:
    """Return all n elements of a sparse vector."""
    values = np.zeros(n, np.float32)
    values[update.indices] = update.values
    return values


def passing(values: Vector, threshold: float) -> int:
    """Return how many magnitudes reach the threshold."""
    return int(np.count_nonzero(np.abs(values) >= np.float32(threshold)))
