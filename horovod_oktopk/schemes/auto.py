"""The fastest of three strategies for the same kind of update, measured on the network at hand.

Small vectors are bound by latency: there Ok-Topk's five exchanges take longer than two, or than a dense allreduce.
*Gathering* everyone's top-k and selecting from the sum gives the bits of Ok-Topk (with exact selection, and values of
full width: of fewer bits, Ok-Topk rounds sums as well), in one allgatherv of 2k(P-1) words; a *dense* allreduce sends
2n(P-1)/P words, and leaves nothing in the residuals.
"""

from __future__ import annotations

import logging
import statistics
import time
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..phases.agreement import Memory
from ..phases.host import whole_update
from ..timing import SAMPLES, WARM_UP, median_seconds, slowest
from ..transport.counting import CountingTransport
from ..vectors.sparse import DenseVector, SparseVector, sum_of
from ..vectors.values import ValueDtype
from .algorithm import Algorithm, Step
from .dense import reduce_densely
from .gtopk import nonzero_top_k
from .step_result import StepResult
from .topka import gather

logger = logging.getLogger("horovod_oktopk")


class Strategy(IntEnum):
    """How a step reduces."""

    SPLIT = 0
    """Ok-Topk."""
    GATHER = 1
    DENSE = 2


TRIAL = 2 * (WARM_UP + SAMPLES)
"""Steps, half of them split and half gathered; then the dense allreduce is timed, and the fastest is taken."""
DENSE_SAMPLE = 1 << 18
"""Elements with which a dense allreduce is timed first, if there are as many."""


class AutoAllreduce(Algorithm):
    """Splitting, gathering or dense, whichever a trial over the first steps found fastest.

    All ranks take the same strategy at every step. Where k, the ranks or their states change, there is a new trial.
    split: Ok-Topk's algorithm. value_dtype: of its options.
    """

    def __init__(self, split: Algorithm, value_dtype: ValueDtype | None) -> None:
        super().__init__(split.description)
        self.split = split
        self.value_dtype = value_dtype
        self.strategy = Strategy.SPLIT
        self.k = self.since = 0  # of the present trial: its k, and its first step
        self._seconds: dict[Strategy, list[float]] = {strategy: [] for strategy in Strategy}

    def take(self, step: Step) -> StepResult:
        self.k = step.k
        if not step.call.in_sync:
            if self.strategy == Strategy.DENSE:
                step.selected = self.split.select(step)
            self._begin_trial(step.t)
        start = time.perf_counter()
        result = super().take(step)
        if step.t < self.since + TRIAL:
            self._learn(time.perf_counter() - start, step)
        return result

    def join_shares(self, step: Step) -> None:
        if self.strategy != Strategy.DENSE:  # which selects nothing
            super().join_shares(step)

    def exchange(self, step: Step) -> StepResult:
        if self.strategy == Strategy.SPLIT:
            return self.split.exchange(step)
        return reduce_densely(step, step.acc.values()) if self.strategy == Strategy.DENSE else self._gather(step)

    def _gather(self, step: Step) -> StepResult:
        ranks = step.ranks(self.value_dtype)
        selection = ranks.codec.round(step.selected)
        with step.phase("allgatherv"):
            parts = gather(selection, step, ranks)
        with step.phase("global_select"):
            update = nonzero_top_k(sum_of(parts), step.global_k, step.transport)
            sent = selection.positions_in(update)
        step.report.strategy = "gather"
        remainder = step.selected.take(sent).minus(selection.take(sent)) if self.value_dtype else None
        return step.result(update, selection.indices[sent], remainder)

    # The trial.

    def _begin_trial(self, step: int) -> None:
        self.strategy, self.since = Strategy.SPLIT, step
        for samples in self._seconds.values():
            samples.clear()

    def _learn(self, seconds: float, step: Step) -> None:
        """Takes note of what this step took, and goes on to the next part of the trial."""
        age = step.t - self.since
        if age % (TRIAL // 2) >= WARM_UP:
            self._seconds[self.strategy].append(seconds + step.transport.phases["select"].seconds)
        if age == TRIAL // 2 - 1:
            self.strategy = Strategy.GATHER
        elif age == TRIAL - 1:
            with step.phase("trial"):
                self.strategy = self._fastest(step)

    def _fastest(self, step: Step) -> Strategy:
        mine = [statistics.median(self._seconds[each] or [np.inf]) for each in (Strategy.SPLIT, Strategy.GATHER)]
        seconds = slowest(mine, step.transport.everyone)
        seconds.append(dense_seconds(step.report.n, step.acc.dtype, min(seconds), step.transport))
        strategy = Strategy(int(np.argmin(seconds)))
        if step.transport.everyone.rank == 0:
            logger.info("strategy='auto' takes %s for n = %d, k = %d: split %.3g s, gather %.3g s, "
                        "dense %s%.3g s", strategy.name.lower(), step.report.n, step.k, *seconds[:2],
                        "" if strategy == Strategy.DENSE else "at least ", seconds[Strategy.DENSE])
        return strategy

    # What is remembered.

    def fits(self, k: int, size: int) -> bool:
        return k == self.k and self.split.fits(k, size)

    def global_k(self, k: int, n: int, size: int) -> int:
        return self.split.global_k(k, n, size)

    def select(self, step: Step) -> SparseVector:
        return SparseVector.empty(step.acc.dtype) if self.strategy == Strategy.DENSE else self.split.select(step)

    def counts(self, selected: SparseVector, n: int, size: int) -> NDArray[np.int64]:
        if self.strategy == Strategy.SPLIT:
            return self.split.counts(selected, n, size)
        return np.full(size, len(selected))

    def memory(self) -> Memory:
        complete = self.strategy != Strategy.SPLIT or self.split.memory().complete
        return Memory(complete, self.strategy, self.since)

    def state(self) -> dict[str, Any]:
        return {**self.split.state(), **super().state(), "strategy": int(self.strategy), "k": self.k,
                "since": self.since, "seconds": [list(self._seconds[strategy]) for strategy in Strategy]}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.split.load_state(state)
        self.strategy, self.k, self.since = Strategy(state["strategy"]), state["k"], state["since"]
        self._seconds = {each: list(samples) for each, samples in zip(Strategy, state["seconds"], strict=True)}

    def forget(self) -> None:
        self.split.forget()
        self._begin_trial(0)


def dense_seconds(n: int, dtype: Any, limit: float, transport: CountingTransport) -> float:
    """Seconds of a dense allreduce of n elements on the slowest rank; or of fewer, if those take more than the limit.

    Lengths double up to n. From a few short ones the time of n cannot be told: a delay or a switch's buffer, and it
    comes out as next to nothing.
    """
    length = min(n, DENSE_SAMPLE)
    while True:
        seconds = slowest([_allreduce_seconds(length, dtype, transport)], transport.everyone)[0]
        if length == n or seconds > limit:
            return seconds
        length = min(n, 2 * length)


def _allreduce_seconds(length: int, dtype: Any, transport: CountingTransport) -> float:
    """Of so many elements, of which a host's ranks reduce a share each, and put them together."""
    hosts, barrier = transport.hosts, np.zeros(1, np.int64)  # so that nobody's time holds another's delay
    bounds = np.array([0, length]) if hosts is None else hosts.bounds(length)
    zeros = np.zeros(np.diff(bounds)[0 if hosts is None else hosts.within.rank], dtype)

    def reduce() -> None:
        total = transport.allreduce(zeros)
        if hosts is not None:
            with transport.phase("host_gather"):
                whole_update(DenseVector(total), bounds, hosts.within)

    return median_seconds(reduce, before=lambda: transport.everyone.allgather(barrier))
