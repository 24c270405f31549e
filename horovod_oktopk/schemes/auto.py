"""The fastest of three strategies for the same kind of update, measured on the network at hand.

Small vectors are bound by latency: there Ok-Topk's five exchanges take longer than two, or than a dense allreduce.
*Gathering* everyone's top-k and selecting from the sum gives the bits of Ok-Topk (with exact selection, and values of
full width: of 16 bits, Ok-Topk rounds sums as well), in one allgatherv of 2k(P-1) words; a *dense* allreduce sends
2n(P-1)/P words, and leaves nothing in the residuals.
"""

from __future__ import annotations

import logging
import statistics
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from ..selection.accumulator import Accumulator
from ..vectors.sparse import SparseVector, sum_of
from .dense import reduce_densely
from .gtopk import nonzero_top_k
from .oktopk import OkTopkAllreduce
from .report import StepReport
from .step_result import StepResult
from .topka import gather

if TYPE_CHECKING:
    from ..transport.counting import CountingTransport

logger = logging.getLogger("horovod_oktopk")


class Strategy(IntEnum):
    """How a step reduces."""

    SPLIT = 0
    """Ok-Topk."""
    GATHER = 1
    DENSE = 2


WARM_UP, SAMPLES = 3, 5
"""Steps of a strategy before it is timed, and steps that are."""
TRIAL = 2 * (WARM_UP + SAMPLES)
"""Steps, half of them split and half gathered; then the dense allreduce is timed, and the fastest is taken."""
DENSE_SAMPLE = 1 << 18
"""Elements with which a dense allreduce is timed first, if there are as many."""


class AutoAllreduce(OkTopkAllreduce):
    """Ok-Topk, gathering or dense, whichever a trial over the first steps found fastest; the arguments are Ok-Topk's.

    All ranks take the same strategy at every step. Where k, the ranks or their states change, there is a new trial.
    """

    strategy = Strategy.SPLIT
    k = since = 0  # of the present trial: its k, and its first step

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds: dict[Strategy, list[float]] = {strategy: [] for strategy in Strategy}

    def reduce(self, acc: Accumulator, k: int, finite: bool, transport: CountingTransport) -> StepResult:
        """See OkTopkAllreduce."""
        if k != self.k:
            self.forget()
            self.k = k
        self._reset_if_size_changed(transport.size)
        report = StepReport(step=self.step + 1, n=acc.n, k=k, phases=transport.phases)
        selected = SparseVector.empty(acc.dtype)
        if self.strategy != Strategy.DENSE:
            selected = self._select(acc, k, finite, report, transport)
        call = self._roll_call(selected, k, finite, transport)
        if call.finite and not call.in_sync:
            if self.strategy == Strategy.DENSE:
                selected = self._select(acc, k, finite, report, transport)
            self._begin(call.step + 1)
        start = time.perf_counter()
        if not call.finite or self.strategy == Strategy.SPLIT:
            result = self._reduce_agreed(selected, k, call, acc.n, report, transport)
        else:
            self.step = report.step = call.step + 1
            report.strategy = self.strategy.name.lower()
            result = (reduce_densely(acc, report, transport) if self.strategy == Strategy.DENSE
                      else self._gather(selected, call.counts[:, 0], k, acc.n, report, transport))
        if call.finite and self.step < self.since + TRIAL:
            self._learn(time.perf_counter() - start, acc, transport)
        return result

    def state(self) -> dict[str, Any]:
        """See OkTopkAllreduce."""
        return {**super().state(), "strategy": int(self.strategy), "k": self.k, "since": self.since,
                "seconds": [list(self._seconds[strategy]) for strategy in Strategy]}

    def load_state(self, state: dict[str, Any]) -> None:
        """See OkTopkAllreduce."""
        super().load_state(state)
        self.strategy, self.k, self.since = Strategy(state["strategy"]), state["k"], state["since"]
        self._seconds = {each: list(samples) for each, samples in zip(Strategy, state["seconds"], strict=True)}

    def forget(self) -> None:
        """See OkTopkAllreduce; there will be a new trial."""
        super().forget()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self.strategy, self.since = Strategy.SPLIT, step
        for samples in self._seconds.values():
            samples.clear()

    def _state_code(self) -> int:
        in_sync = self.strategy != Strategy.SPLIT or super()._state_code()
        return 1 + len(Strategy) * self.since + self.strategy if in_sync else 0

    def _counts(self, selected: SparseVector, size: int) -> np.ndarray[Any, Any]:
        if self.strategy == Strategy.SPLIT:
            return super()._counts(selected, size)
        return np.full(size, len(selected))

    def _gather(self, selected: SparseVector, lengths: np.ndarray[Any, Any], k: int, n: int, report: StepReport,
                transport: CountingTransport) -> StepResult:
        codec = self._codec(selected.values.dtype)
        selection = codec.round(selected)
        with transport.phase("allgatherv"):
            parts = gather(selection, lengths, n, codec, transport)
        with transport.phase("global_select"):
            update = nonzero_top_k(sum_of(parts), k)
            sent = selection.positions_in(update)
        report.local_selected, report.global_selected = len(selection), len(update)
        remainder = selected.take(sent).minus(selection.take(sent)) if codec.value_dtype else None
        return StepResult(update, selection.indices[sent], report, remainder)

    def _learn(self, seconds: float, acc: Accumulator, transport: CountingTransport) -> None:
        """Takes note of what this step took, and goes on to the next part of the trial."""
        age = self.step - self.since
        if age % (TRIAL // 2) >= WARM_UP:
            self._seconds[self.strategy].append(seconds + transport.phases["select"].seconds)
        if age == TRIAL // 2 - 1:
            self.strategy = Strategy.GATHER
        elif age == TRIAL - 1:
            with transport.phase("trial"):
                self.strategy = self._fastest(acc, transport)

    def _fastest(self, acc: Accumulator, transport: CountingTransport) -> Strategy:
        mine = [statistics.median(self._seconds[each] or [np.inf]) for each in (Strategy.SPLIT, Strategy.GATHER)]
        seconds = _slowest(mine, transport)
        seconds.append(dense_seconds(acc.n, acc.dtype, min(seconds), transport))
        strategy = Strategy(int(np.argmin(seconds)))
        if transport.rank == 0:
            logger.info("strategy='auto' takes %s for n = %d, k = %d: split %.3g s, gather %.3g s, "
                        "dense %s%.3g s", strategy.name.lower(), acc.n, self.k, *seconds[:2],
                        "" if strategy == Strategy.DENSE else "at least ", seconds[Strategy.DENSE])
        return strategy


def dense_seconds(n: int, dtype: Any, limit: float, transport: CountingTransport) -> float:
    """Seconds of a dense allreduce of n elements on the slowest rank; or of fewer, if those take more than the limit.

    Lengths double up to n. From a few short ones the time of n cannot be told: a delay or a switch's buffer, and it
    comes out as next to nothing.
    """
    length = min(n, DENSE_SAMPLE)
    while True:
        seconds = _slowest([_allreduce_seconds(length, dtype, transport)], transport)[0]
        if length == n or seconds > limit:
            return seconds
        length = min(n, 2 * length)


def _slowest(seconds: list[float], transport: CountingTransport) -> list[float]:
    """Of each entry the largest of all ranks."""
    rows = transport.allgather((1e9 * np.minimum(seconds, 1e6)).astype(np.int64))
    slowest: list[float] = (rows.max(axis=0) / 1e9).tolist()
    return slowest


def _allreduce_seconds(length: int, dtype: Any, transport: CountingTransport) -> float:
    zeros, seconds = np.zeros(length, dtype), []
    for _ in range(1 + SAMPLES):
        transport.allgather(np.zeros(1, np.int64))  # so that nobody's time holds another's delay
        start = time.perf_counter()
        transport.allreduce(zeros)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
