"""The part of a step that communicates, beside the program's next step; and its results for w and for p."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...errors import NonFiniteError
from ...kernels import KERNELS
from ...phases.agreement import Measured
from ...phases.exchange import whole_update
from ...schemes.algorithm import Algorithm, Step
from ...schemes.report import StepResult
from ...transport.counting import Hosts
from ...vectors.sparse import DenseVector, SparseVector
from ..reduction import Reduction
from .model import Model
from .pace import Pace

NOT_FINITE = ("the parameters of ranks {ranks} are not finite after their own step, though their gradients were. "
              "Training has diverged: try a lower learning rate. The shared parameters are intact: "
              "shared_parameters(optimizer)")
OVERFLOW = ("the ranks' moves are finite, and their sum is not: training has diverged. Try a lower learning rate. "
            "The shared parameters are intact: shared_parameters(optimizer)")


@dataclass(frozen=True)
class Outcome:
    """The outcome of an exchange."""

    result: StepResult
    update: SparseVector | DenseVector | None = None
    """The vector to subtract from w; None if a step was not taken."""
    change: SparseVector | DenseVector | None = None
    """The vector to add to p."""
    measured: Measured | None = None
    """The measurements that all ranks have told of their gradients."""


class Exchange:
    """The exchanges of one model's w - p: one at a time, beside the program's next step. adds: True for sums."""

    def __init__(self, reduction: Reduction, model: Model, pace: Pace, adds: bool) -> None:
        self._reduction, self._model, self._pace, self._adds = reduction, model, pace, adds
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[Outcome] | None = None

    def begin(self, anticipate: bool) -> None:
        """Read and select w - p, and begin to communicate: in a thread, if the transport can be used there.

        anticipate: move p until the exchange is applied; see Model.
        """
        reduction, transport, pace = self._reduction, self._reduction.open(), self._pace
        algorithm, k, n = reduction.algorithm, reduction.k, self._model.n
        acc, finite, all_finite = self._model.read(algorithm, k, transport)
        step = algorithm.begin(acc, k, finite, transport, whole=n)
        step.sample = pace.sample
        acc.release()
        if all_finite:
            algorithm.select_together(step)
            if anticipate:
                self._model.anticipate(whole(step.selected, transport.hosts, n), pace.coefficient)
        run = partial(complete, algorithm, step, pace.coefficient * (1 if self._adds else transport.size))
        if transport.concurrent:
            self._thread = self._thread or ThreadPoolExecutor(1, "horovod_oktopk")
            self._under_way = self._thread.submit(run)
        else:
            self._under_way = _done(run)

    def apply(self) -> None:
        """Wait for the exchange under way, if any, and apply it.

        Raise AgreementError, NonFiniteError or TransportError if the exchange did.
        """
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            outcome = under_way.result()
        finally:
            self._model.take_back()
        result = outcome.result
        self._reduction.report = result.report
        self._pace.take(outcome.measured, result.report)
        if result.update is None:
            raise NonFiniteError(NOT_FINITE.format(ranks=list(result.not_finite)))
        if outcome.update is None or outcome.change is None:  # on all ranks alike
            raise NonFiniteError(OVERFLOW)
        with self._reduction.writing():
            self._model.apply(outcome.update, outcome.change)

    def drop(self) -> None:
        """Wait for the exchange, so that none of its messages meets a later one; drop its outcome or error."""
        self.wait()
        self._under_way = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the exchange has ended, or for `timeout` seconds at most. `apply` is still to be called."""
        if self._under_way is not None:
            wait_for([self._under_way], timeout)


def _done(run: Callable[[], Outcome]) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    try:
        future.set_result(run())
    except Exception as error:
        future.set_exception(error)
    return future


def complete(algorithm: Algorithm, step: Step, divisor: float) -> Outcome:
    """Complete the exchange of a step that has begun. divisor: the number to divide a sum by for w."""
    hosts, n = step.transport.hosts, step.report.n
    with nullcontext() if hosts is None else hosts.step():
        result = algorithm.complete(step)
        told = Outcome(replace(result, selected=None), measured=step.call.measured)
        if result.update is None or not np.isfinite(result.update.values).all():
            return told
        update = result.update.divided(divisor)
        if hosts is None:
            return replace(told, update=update, change=local_change(update, result))
        assert isinstance(update, SparseVector)
        change = local_change(_share_of(update, hosts, n), result)
        assert isinstance(change, SparseVector)
        return replace(told, update=update, change=whole(change, hosts, n))


def _share_of(update: SparseVector, hosts: Hosts, n: int) -> SparseVector:
    """Return the part of an update that lies in this rank's share, with indices from the share's start."""
    start, stop = hosts.bounds(n)[hosts.within.rank:hosts.within.rank + 2].tolist()
    part = slice(*np.searchsorted(update.indices, [start, stop]).tolist())
    return SparseVector(update.indices[part] - start, update.values[part])


def whole(vector: SparseVector, hosts: Hosts | None, n: int) -> SparseVector:
    """Return the vector of all shares of n elements; each rank of a host gives that of its own share."""
    if hosts is None:
        return vector
    with hosts.within.phase("host_gather"):
        return whole_update(vector, hosts.bounds(n), hosts.within)


def local_change(update: SparseVector | DenseVector, result: StepResult) -> SparseVector | DenseVector:
    """Return the change of p: minus the update, plus this rank's contribution to the update.

    All indices that contributed, and all that rounding left over, are indices of the update.
    """
    sent = result.sent()
    if isinstance(update, DenseVector):
        return DenseVector(sent.values - update.values)
    assert isinstance(sent, SparseVector)
    change = -update.values
    KERNELS.add(change, KERNELS.common_positions(update.indices, sent.indices), sent.values)
    kept = result.remainder
    if kept is not None:
        KERNELS.add(change, KERNELS.common_positions(update.indices, kept.indices), -kept.values)
    return SparseVector(update.indices, change)
