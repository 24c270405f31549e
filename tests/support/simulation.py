"""Runs the algorithm over several steps on ranks that are threads, and keeps what the tests look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_oktopk import OkTopk
from horovod_oktopk.phases.agreement import Attendance
from horovod_oktopk.schemes.algorithm import NOTHING, Algorithm, Memory
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.schemes.step import Outcome, reduce
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.vectors.sparse import SparseVector
from tests.support.threads import run_ranks

TIMEOUT = 20.0


@dataclass
class Record:
    """One step on one rank."""

    acc: np.ndarray
    residual: np.ndarray
    update: SparseVector | None
    contributed: np.ndarray
    report: StepReport


@dataclass
class Rank:
    """One rank of a simulated training run; a run may stop, and go on from here."""

    scheme: Algorithm
    accumulator: NumpyAccumulator
    memory: Memory = field(default_factory=Memory)
    records: list[Record] = field(default_factory=list)

    def reduce(self, gradient: np.ndarray, k: int, transport: CountingTransport) -> Outcome:
        """Take one step, as a mode does."""
        finite = self.accumulator.accumulate([(0, gradient)])
        outcome = reduce(self.scheme, self.accumulator, Attendance("", k, finite=finite), self.memory, transport)
        self.memory, result = outcome.memory, outcome.result
        if result is not None:
            self.accumulator.commit(result.contributed, result.remainder)
        return outcome

    def step(self, gradient: np.ndarray, k: int, transport: CountingTransport) -> Record:
        transport.reset()
        acc = self.accumulator.residual + gradient
        outcome = self.reduce(gradient, k, transport)
        result = outcome.result
        self.records.append(Record(acc, self.accumulator.residual.copy(), result and result.update,
                                   NOTHING if result is None else result.contributed, outcome.report))
        return self.records[-1]


def new_ranks(size: int, n: int, dtype: Any = np.float32, make: Any = None, **options: Any) -> list[Rank]:
    """Return new ranks. options: see `making`, unless `make` makes the algorithm."""
    make = make or making(**options)
    return [Rank(make(), NumpyAccumulator(n, dtype)) for _ in range(size)]


def making(balance_trigger: float | None = None, **options: Any) -> Any:
    """Return a maker of Ok-Topk's algorithm. balance_trigger: in place of its constant."""
    def make() -> Any:
        algorithm = OkTopk(**options).algorithm()
        if balance_trigger is not None:
            algorithm.balance_trigger = balance_trigger
        return algorithm

    return make


def keeping(global_k: int, case: Any, **options: Any) -> Any:
    """Return a `make` of algorithms that keep `global_k` elements of the sum."""
    return making(density=min(1, case.k / case.n), global_density=min(1, global_k / case.n), **options)


def advance(ranks: list[Rank], gradients: np.ndarray, k: int) -> list[list[Record]]:
    """Take steps with gradients of shape (steps, P, n); return their records as [step][rank]."""
    def program(transport):
        counting = CountingTransport(transport)
        return [ranks[transport.rank].step(step[transport.rank], k, counting) for step in gradients]

    by_rank = run_ranks(len(ranks), program, timeout=TIMEOUT)
    return [list(step) for step in zip(*by_rank, strict=True)]


def simulate(gradients: np.ndarray, k: int, **options: Any) -> list[list[Record]]:
    """Return the records of a whole run: [step][rank]. options: see new_ranks."""
    _, size, n = gradients.shape
    return advance(new_ranks(size, n, gradients.dtype, **options), gradients, k)


def dense(vector: SparseVector, n: int) -> np.ndarray:
    out = np.zeros(n, vector.values.dtype)
    out[vector.indices] = vector.values
    return out


def same_bits(left: Any, right: Any) -> bool:
    """Return True for the same bits: NaN equals itself, and -0 is not 0."""
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def same_runs(left: list[list[Record]], right: list[list[Record]]) -> bool:
    """Return True if two runs gave the same updates and left the same residuals, bit for bit."""
    return len(left) == len(right) and all(
        same_bits(a.update.indices, b.update.indices) and same_bits(a.update.values, b.update.values)
        and same_bits(a.residual, b.residual)
        for step, other in zip(left, right, strict=True) for a, b in zip(step, other, strict=True))
