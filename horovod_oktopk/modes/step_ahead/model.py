"""The two sets of parameters of one model, w, which all ranks share, and p, this rank's own; and their exchanges.

If a host is one worker, each of its ranks reads a slice of w - p, and all are to have the same p.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...hosts.worker import Worker
from ...kernels import KERNELS
from ...schemes.algorithm import Result
from ...schemes.step import Begun, Outcome, begin, complete
from ...selection.accumulator import Pieces
from ...selection.parameter_accumulator import ParameterAccumulator
from ...selection.replica import Replica
from ...transport.base import Transport, broadcast
from ...vectors.sparse import SparseVector, Values
from ..reduction import Reduction
from .life import Event, Life, after

PUT_TOGETHER = ("the state was saved with other hosts: what the ranks of this host had not sent was combined. They "
                "take the same steps now, so make their optimizer state (momentum, moments) the same: "
                "call broadcast_optimizer_state(optimizer, root_rank=0)")


class Before(NamedTuple):
    """A checksum of w before the program can change it, and w - p then, on the host, in the order in memory."""

    checksum: int
    residual: Values


class Model:
    """One rank's w and p. The accumulator holds w; the replica gives access to p, in the model."""

    def __init__(self, accumulator: ParameterAccumulator, replica: Replica) -> None:
        self.life = Life.NEW
        self.digest = ""
        """A short text that differs if one bit of w does; as of `start` or `update_digest`."""
        self.copies = 1
        """Number of consecutive ranks that have this rank's residual."""
        self._accumulator, self._replica = accumulator, replica
        self.anticipated: SparseVector | None = None
        """The vector by which p goes back before an exchange is applied; to be None if p is set anew before."""
        self._before: Before | None = None  # inside `shared_parameters`

    def passes(self, event: Event) -> None:
        """Pass on to the state that follows an event."""
        self.life = after(self.life, event)

    def start(self, copies: int) -> None:
        """Take p as w. This number of ranks have the same residual."""
        self._accumulator.start(self._replica.pieces())
        self.update_digest()
        self.copies, self._before = copies, None
        self.passes(Event.START)

    def show(self) -> None:
        """Put w into the model, in place of p."""
        with np.errstate(over="ignore", invalid="ignore"):  # training may have diverged, and w is intact
            self._before = Before(self._checksum(), self._residual())
        self.swap()
        self.passes(Event.SHOW)

    def hide(self) -> None:
        """Put p into the model, in place of w."""
        self.swap()
        self.follow()
        self._before = None
        self.passes(Event.HIDE)

    def follow(self) -> None:
        """Move p along with w, which is not in the model now, if the program has changed it since `show`.

        Otherwise the change would be a part of w - p, and the next exchanges would undo it. What is not finite of
        w - p, as training has diverged, is dropped then.
        """
        before = self._before
        if before is not None and (checksum := self._checksum()) != before.checksum:
            residual = np.nan_to_num(before.residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            self._before = Before(checksum, residual)
            self._replica.assign(self._accumulator.minus(residual))
            self.update_digest()
            self.passes(Event.CHANGE)

    def suspend(self) -> None:
        """Put w into the model, and forget p."""
        if not self.life.is_shown:
            self.swap()
        self._before = None
        self.passes(Event.SUSPEND)

    def swap(self) -> None:
        """Swap w and p: the model holds the other one."""
        self._replica.swap(self._accumulator.shared)

    # A step.

    def pieces(self) -> Pieces:
        """Return the parameters as they lie in memory, to be read until they change."""
        return self._replica.pieces()

    def read(self, worker: Worker, pieces: Pieces) -> tuple[ParameterAccumulator, bool]:
        """Return this rank's part of w - p, and True if it is finite.

        Only the accumulator holds the parameters' memory afterwards, until the accumulator is released.
        """
        acc, own = worker.part(self._accumulator, pieces)
        return acc, acc.accumulate(own)

    def anticipate(self, selected: SparseVector, coefficient: float) -> None:
        """Move p, until the exchange is applied, as if all ranks had selected the same as this one.

        A local step moves p by only a fraction λ (`coefficient`) of the optimizer's step; the exchange adds the rest.
        If the rest arrived one step late, then with large learning rates and momentum the gradients would be computed
        at stale parameters. selected = w - p at the selected elements, which is λ of a step already.
        """
        if coefficient < 1:
            factor = selected.values.dtype.type(1 / coefficient - 1)
            self.anticipated = selected.with_values(factor * selected.values)
            self._replica.add(selected.with_values(-self.anticipated.values))

    def take_back(self) -> None:
        """Move p back by what was anticipated."""
        if self.anticipated is not None:
            self._replica.add(self.anticipated)
            self.anticipated = None

    def apply(self, update: SparseVector, change: SparseVector) -> None:
        """Set w to w - update, and p to p + change: what contributed leaves w - p, what rounding left over stays."""
        self._accumulator.commit(update)
        self._replica.add(change)

    # The residual.

    def settled_residual(self) -> Values:
        """Return w - p, in the order of indices; set p to w - (w - p), which rounds p, as a resumed run has it."""
        residual = self._residual()
        self._replica.assign(self._accumulator.minus(residual))
        return self._replica.logical(residual)

    def set_residual(self, residual: Values) -> None:
        """Set p to w - residual."""
        self._replica.assign(self._accumulator.minus(self._replica.in_memory(residual)))

    def _residual(self) -> NDArray[Any]:
        self._accumulator.accumulate(self._replica.pieces())
        residual = self._accumulator.values()
        self._accumulator.release()
        return residual

    # The ranks.

    def become_alike(self, within: Transport, adds: bool) -> None:
        """Give the ranks of a worker one residual: that of all of them, if a state of another shape was loaded.

        `within` leads to the worker's ranks. Residuals are added up if `adds`, or else averaged. Collective there.
        """
        size = within.size
        if not within.allgather(np.array([self.life is Life.RESTORED], np.int64)).any():
            return
        residual = self._residual()
        mine = np.array([self.copies, zlib.crc32(residual.data)])
        copies, digests = within.allgather(mine).T
        self.copies = size
        if (copies == size).all() if adds else (digests == digests[0]).all():
            return
        warnings.warn(PUT_TOGETHER, stacklevel=2)
        residual = within.allreduce(residual / residual.dtype.type(mine[0] if adds else size))
        self._replica.assign(self._accumulator.minus(residual))

    def adopt(self, transport: Transport) -> bool:
        """Set p to rank 0's w if a rank has another w. Collective. Return True if this rank has; then start anew."""
        digests = transport.allgather(np.frombuffer(bytes.fromhex(self.digest), np.int64))[:, 0]
        if (digests == digests[0]).all():
            return False
        first = broadcast(self._accumulator.read_shared(), transport)
        if digests[transport.rank] == digests[0]:
            return False
        self._replica.assign(first)
        return True

    def _checksum(self) -> int:
        """Return a number that almost certainly differs if w does; faster than a digest."""
        return zlib.crc32(self._accumulator.read_shared().data)

    def update_digest(self) -> None:
        """Take the digest of the present w."""
        values = np.ascontiguousarray(self._replica.logical(self._accumulator.read_shared()))
        self.digest = hashlib.blake2b(values.view(np.uint8).data, digest_size=8).hexdigest()


Moves = tuple[SparseVector, SparseVector]
"""The vectors to subtract from w, and to add to p."""


class Exchange:
    """The exchanges of one model's w - p: one at a time, beside the program's next step."""

    def __init__(self, reduction: Reduction, model: Model, adds: bool) -> None:
        self._reduction, self._model, self._adds = reduction, model, adds
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[tuple[Outcome, Moves | None]] | None = None

    def begin(self, coefficient: float, overshoot: float, sample: Values | None, anticipate: bool) -> None:
        """Read and select w - p, and begin to communicate: in a thread, if the transport can be used there.

        See `Scheme.overshoot_of_p`. The sample has the gradient's measurements. If `anticipate`, p moves until the
        exchange is applied; see Model.
        """
        reduction, transport = self._reduction, self._reduction.open()
        worker, said, pieces = reduction.worker, reduction.attendance(sample=sample), self._model.pieces()
        with transport.phase("accumulate"):
            acc, finite = self._model.read(worker, pieces)
        said = replace(said, finite=finite)
        all_finite = worker.agree(said)
        worker.check_alike(pieces, said)
        begun = begin(worker.algorithm, acc, said, reduction.memory, transport, reduction.layout.n)
        del pieces
        acc.release()
        if all_finite and anticipate:
            self._model.anticipate(worker.gather(begun.mine.elements, reduction.layout.n), coefficient)
        divisor = coefficient * (1 if self._adds else worker.algorithm.workers(transport))
        run = partial(_complete, worker, begun, divisor, overshoot)
        if transport.concurrent:
            self._thread = self._thread or ThreadPoolExecutor(1, "horovod_oktopk")
            self._under_way = self._thread.submit(run)
        else:
            self._under_way = _done(run)

    def finish(self) -> tuple[Outcome, Moves | None] | None:
        """Wait for the exchange under way, if any; return its outcome, which the caller applies, or raise its error.

        The moves are None if the step does not count. p is as it was before the exchange was anticipated.
        """
        if self._under_way is None:
            return None
        under_way, self._under_way = self._under_way, None
        try:
            return under_way.result()
        finally:
            self._model.take_back()

    def drop(self) -> None:
        """Wait for the exchange, so that none of its messages meets a later one; drop its outcome or error."""
        self.wait()
        self._under_way = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the exchange has ended, or for `timeout` seconds at most. `finish` is still to be called."""
        if self._under_way is not None:
            wait_for([self._under_way], timeout)


def _done(run: Callable[[], tuple[Outcome, Moves | None]]) -> Future[tuple[Outcome, Moves | None]]:
    future: Future[tuple[Outcome, Moves | None]] = Future()
    try:
        future.set_result(run())
    except Exception as error:
        future.set_exception(error)
    return future


def _complete(worker: Worker, begun: Begun, divisor: float, overshoot: float) -> tuple[Outcome, Moves | None]:
    """Complete the exchange of a step that has begun; return its moves, if it counts.

    w moves by the ranks' sum, divided by `divisor`, and p past w by `overshoot`.
    """
    with begun.transport.step():
        outcome = complete(begun)
        result, n = outcome.result, begun.report.n
        if result is None or not np.isfinite(result.update.values).all():
            return replace(outcome, result=None), None
        update = result.update.divided(divisor)
        own = worker.own(update, n)
        change = correction_of_p(own, result)
        if overshoot and begun.report.k < n and len(update.values) < n:  # sums that are zero may be left out
            _move_past_w(change, own, divisor / begun.algorithm.workers(begun.transport), overshoot)
        return replace(outcome, result=None), (update, worker.gather(change, n))  # it may have n elements


def correction_of_p(update: SparseVector, result: Result) -> SparseVector:
    """Return the change of p: minus the update, plus this rank's contribution to the update.

    All indices that contributed, and all that rounding left over, are indices of the update.
    """
    sent, reached = result.selected, result.reached
    if isinstance(reached, np.ndarray) and len(reached) < len(sent):
        sent = sent.take(KERNELS.common_positions(sent.indices, reached))
    if len(sent) == len(update):  # then they are the same, and may be all n
        change = update.with_values(sent.values - update.values)
    else:
        change = update.with_values(-update.values)
        _add_within(change, sent)
    kept = result.remainder
    if kept is not None:
        _add_within(change, kept.with_values(-kept.values))
    return change


def _move_past_w(change: SparseVector, update: SparseVector, mean_factor: float, overshoot: float) -> None:
    """Let p move past w: by `overshoot` times this rank's contribution c, less the workers' mean of contributions.

    change = c - update, and the mean is mean_factor · update.
    """
    differs = change.values if mean_factor == 1 else change.values + (1 - mean_factor) * update.values
    np.add(change.values, overshoot * differs, out=change.values)


def _add_within(vector: SparseVector, part: SparseVector) -> None:
    """Add a part to the vector in place, which has all of its indices."""
    if len(part) == len(vector):  # then they are the same
        np.add(vector.values, part.values, out=vector.values)
    else:
        KERNELS.add(vector.values, vector.positions_in(part), part.values)
