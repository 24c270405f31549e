"""Ranks that are simulated by threads: they compute one after the other, and hold only their largest elements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.simulated_links import Crossing, LinkLog, LinkTransport
from horovod_oktopk.phases.agreement import Attendance
from horovod_oktopk.schemes.algorithm import Memory
from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.schemes.step import reduce
from horovod_oktopk.selection.accumulator import Accumulator
from horovod_oktopk.transport.base import Bytes, Counts, Transport
from horovod_oktopk.vectors.runs import Runs
from horovod_oktopk.vectors.sparse import SparseVector, Values
from tests.support.threads import ThreadTransport, run_ranks

T = TypeVar("T")


class TopAccumulator(Accumulator):
    """An Accumulator of which only the largest elements are known; the others count as zero.

    Every step brings its own elements, so there is no residual to keep.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.dtype = np.dtype(np.float32)
        self.expected = np.inf
        self._held = SparseVector.empty(self.dtype)

    def accumulate(self, gradient: SparseVector) -> None:
        """Set acc to the gradient."""
        self._held = gradient

    def expect_threshold(self, threshold: float, limit: int) -> None:  # noqa: ARG002
        """Let the elements go, once the selection is done: of a thousand ranks they are some gigabytes."""
        self.expected = threshold
        self._held = SparseVector.empty(self.dtype)

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        found = self._held.compress(np.abs(self._held.values) >= np.float32(threshold))
        return found if len(found) <= limit else None

    def sample(self, stride: int) -> Values:
        magnitudes = np.zeros(-(-self.n // stride), self.dtype)
        hit = self._held.compress(self._held.indices % stride == 0)
        magnitudes[hit.indices // stride] = np.abs(hit.values)
        return magnitudes

    def elements_at(self, places: Runs) -> Values:
        raise NotImplementedError("the other elements are not known")

    def moments(self) -> tuple[float, float]:
        raise NotImplementedError("the other elements are not known")

    def values(self) -> Values:
        raise NotImplementedError("the other elements are not known")


@dataclass(frozen=True)
class PopularElements:
    """Gradients of all ranks. The x-th most popular element is in a rank's top-k with probability ~ x^-tail."""

    n: int
    k: int
    tail: float
    seed: int

    @cached_property
    def order(self) -> NDArray[np.int32]:
        """The index of every x. 16 layers have shares of the popular elements that differ up to sixteenfold."""
        random = np.random.default_rng(self.seed)
        layers = np.repeat(np.geomspace(0.25, 4, 16), -(-self.n // 16))[:self.n]
        return np.argsort(random.exponential(layers)).astype(np.int32)

    @cached_property
    def octaves(self) -> list[tuple[int, int, int]]:
        """(start, stop, how many a rank selects) of ranges of x that double in length; k are selected in all."""
        low, high = 1.0, float(self.k)
        for _ in range(60):  # the first range is selected whole; it is as long as gives k in all
            middle = (low + high) / 2
            low, high = (middle, high) if sum(c for *_, c in self._octaves(middle)) < self.k else (low, middle)
        found = [(start, stop, int(count)) for start, stop, count in self._octaves(high)]
        for number in range(len(found) - 1, -1, -1):  # what rounding left
            start, stop, count = found[number]
            more = min(stop - start - count, self.k - sum(c for *_, c in found))
            found[number] = (start, stop, count + more)
        return found

    def _octaves(self, first: float) -> list[tuple[int, int, float]]:
        found, start, stop, share = [], 0, max(1, round(first)), 1.0
        while start < self.n:
            found.append((start, stop, share * (stop - start)))
            start, stop, share = stop, min(2 * stop, self.n), share / 2**self.tail
        return found

    def draw(self, rank: int, step: int) -> SparseVector:
        """Return a rank's 2k largest elements: k by popularity, above 1, and others anywhere below."""
        random = np.random.default_rng([self.seed, rank, step])
        chosen = np.concatenate([start + random.choice(stop - start, count, replace=False, shuffle=False)
                                 for start, stop, count in self.octaves])
        selected = self.order[chosen].astype(np.int64)
        spare = np.setdiff1d(random.integers(self.n, size=min(self.k, self.n - self.k)), selected)
        signs = np.where(chosen % 2, 1.0, -1.0)  # the ranks agree
        values = np.concatenate([signs * (1.001 + random.exponential(0.3, len(selected))),
                                 random.uniform(0.5, 1.0, len(spare))]).astype(np.float32)
        indices = np.concatenate([selected, spare])
        ascending = np.argsort(indices)
        return SparseVector(indices[ascending], values[ascending])


class TakeTurns(Transport):
    """A transport around a ThreadTransport, with which one rank computes at a time: temporaries of one, not of P."""

    def __init__(self, inner: ThreadTransport, turn: threading.Lock) -> None:
        self.rank, self.size, self.concurrent = inner.rank, inner.size, inner.concurrent
        self._inner, self._turn = inner, turn

    def allgather(self, row: Counts) -> Counts:
        return self._wait(lambda: self._inner.allgather(row))

    def alltoall(self, rows: Counts) -> Counts:
        return self._wait(lambda: self._inner.alltoall(rows))

    def allreduce(self, values: Values) -> Values:
        return self._wait(lambda: self._inner.allreduce(values))

    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        yield from self._wait(lambda: list(self._inner.send_and_receive(outgoing, incoming)))

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        return self._wait(lambda: self._inner.allgatherv(message, sizes))

    def _wait(self, call: Callable[[], T]) -> T:
        self._turn.release()
        try:
            return call()
        finally:
            self._turn.acquire()


@dataclass(frozen=True)
class RankStep:
    """One step of one rank. crossings: by phase."""

    report: StepReport
    crossings: dict[str, Crossing]


def simulate(options: Scheme, size: int, gradients: PopularElements, steps: int, advance: Callable[[], object],
             ) -> list[list[RankStep]]:
    """Return the steps, by step and rank."""
    turn = threading.Lock()

    def program(inner: ThreadTransport) -> list[RankStep]:
        found = []
        with turn:
            transport, algorithm = LinkTransport(TakeTurns(inner, turn), LinkLog()), options.algorithm()
            accumulator, memory = TopAccumulator(gradients.n), Memory()
            for step in range(steps):
                transport.reset()
                accumulator.accumulate(gradients.draw(inner.rank, step))
                outcome = reduce(algorithm, accumulator, Attendance("", gradients.k), memory, transport)
                memory = outcome.memory
                found.append(RankStep(outcome.report, transport.log.crossings))
                advance()
        return found

    return [list(ranks) for ranks in zip(*run_ranks(size, program, timeout=600.0), strict=True)]
