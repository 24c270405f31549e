"""`Partial`, in every integration: gradients are added to a residual, and rounds take from it.

So error feedback serves late ranks as well: values that such a rank could not contribute wait in its residual, and
the sum of all gradients equals the applied updates plus the residuals.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar, NoReturn

import numpy as np

from ...errors import OkTopkError, PluginError
from ...schemes.report import StepReport
from ...selection.accumulator import Accumulator, EmptyAccumulator, Piece, ResidualAccumulator
from ...state.records import Record
from ...transport.connect import barrier
from ...transport.counting import CountingTransport, Traffic
from ...transport.ending import leave, unhappy_end
from ...transport.ranks import Ranks, is_elastic
from ...transport.stalls import StallLimits
from ...vectors.layout import Layout
from ...vectors.sparse import Indices, SparseVector, Values, sum_of
from ..gradient_mode import GradientMode
from ..gradient_reduction import GradientReduction
from ..gradients import ReducedGradients
from ..mode import Mode
from ..options import NEEDS_MPI, Partial
from .rounds import PartialAllreduce, Round
from .states import Presence

logger = logging.getLogger("horovod_oktopk")

ONE_AT_A_TIME = ("a second optimizer with Partial has taken a step, and this one takes another: ranks would wait for "
                 "each other in the rounds of both. Give the other one another compression, as OkTopk, or train them "
                 "one after the other")
IN_STEP_ONLY = ("with Partial the gradients are handed in by the optimizer's step, which may apply several updates: "
                "synchronize() and skip_synchronize() cannot be used, nor loss scaling (GradScaler, "
                "LossScaleOptimizer), whose scale would have to be one for all ranks. bfloat16 needs none")


class Pending:
    """Residual + gradients of one rank. `accumulator` holds them from `hand_in` until a round commits them.

    `is_finite` is True if all gradients were since this rank last contributed.
    """

    def __init__(self, accumulator: ResidualAccumulator, layout: Layout) -> None:
        self._accumulator = accumulator
        self._nothing = EmptyAccumulator(layout.n, layout.dtype)
        self._is_held = self._contributes = False
        self.is_finite = True
        self._remainders: list[SparseVector] = []
        """Rounding errors of rounds to which this rank contributed nothing; for its next commit."""

    def hand_in(self, pieces: Iterable[Piece]) -> None:
        """Add gradients to the residual, and to the gradients that wait."""
        held, self._is_held = self._is_held, False  # also where what follows fails
        if held:
            self._accumulator.commit(np.empty(0, np.int64))
        self._is_held = self._accumulator.accumulate(pieces)
        self.is_finite = self.is_finite and self._is_held

    def for_round(self, contributes: bool) -> Accumulator:
        """Return what this rank gives to a round: an accumulator of nothing if it does not contribute."""
        self._contributes = contributes and self._is_held
        return self._accumulator if self._contributes else self._nothing

    def commit(self, contributed: Indices | slice, remainder: SparseVector | None) -> None:
        """Commit a round. The remainder holds rounding errors of this rank's selection, and of sums it rounded."""
        if remainder is not None and len(remainder):
            self._remainders.append(remainder)
        if self._contributes:
            self._accumulator.commit(contributed, sum_of(self._remainders) if self._remainders else None)
            self._remainders.clear()
            self._is_held = False

    def read(self) -> Values:
        """Return a copy of the residual and all that waits: shape (n,)."""
        values = self._accumulator.values().copy() if self._is_held else self._accumulator.read_residual()
        for remainder in self._remainders:
            values[remainder.indices] += remainder.values
        return values


class PartialMode(Mode[ReducedGradients]):
    """The reduction of the gradients of one layout in partial rounds; one object on each rank.

    `settings` names the numbers that every rank gives with its gradients; a round uses those of one rank.
    The other arguments are GradientReduction's.
    """

    reduction: GradientReduction
    refused: ClassVar[Mapping[str, str]] = {
        **GradientMode.refused,
        "closure": "step(closure) cannot be used with Partial, which applies several updates, or none: call step() "
                   "without one",
        "synchronize": IN_STEP_ONLY, "scaler": IN_STEP_ONLY,
        "torchrun": "Partial needs MPI, over which a rank can be asked for a round while it computes: start the job "
                    "by horovodrun --mpi, and use hvd.DistributedOptimizer",
        "sharded": "{name} cannot be used with Partial: its steps meet all ranks, which do not step together: use "
                   "OkTopk",
        "sparse": "sparse gradients go by Horovod's own allgather, which waits for all ranks: give "
                  "sparse_as_dense=True with Partial",
        "passes": "Partial takes backward_passes_per_step=1; got {passes!r}. Keras' gradient_accumulation_steps can "
                  "be used",
        "momentum_correction": "{name} corrects the momentum at a batch, and with Partial the optimizer steps in "
                               "rounds, which come at other batches on each rank: give momentum_correction=False",
        "several": "MultiOptimizer cannot be used with Partial, whose rounds carry one learning rate: give each part "
                   "of the model an optimizer of its own, or use OkTopk",
        "local": "a local variable cannot be used with Partial, whose steps apply several updates, or none: give "
                 "local layers an optimizer of their own"}

    def __init__(self, options: Partial, average: bool, layout: Layout,
                 make_accumulator: Callable[[], ResidualAccumulator], ranks: Ranks,
                 settings: Sequence[str] = ()) -> None:
        self.partial = options
        self.drifts = not options.in_order
        self._next_scheme = options.scheme
        own = [f"partial {name}: {value}" for name, value in options.settings().items()]
        signature = [*own, f"settings: {', '.join(settings)}", *layout.describe()]
        title = f"Partial({type(self._next_scheme).__name__}, policy={options.policy!r})"
        reduction = GradientReduction(self._next_scheme, average, layout, make_accumulator, ranks, title, signature)
        super().__init__(reduction, reduction.residuals)
        self._settings = len(settings)
        self._pending = Pending(reduction.accumulator, layout)
        self._allreduce: PartialAllreduce | None = None
        self._accumulating = Traffic()
        self._to_apply: deque[tuple[SparseVector, tuple[float, ...]]] = deque()  # with the settings of their rounds

    def announce(self, doing: str) -> None:
        """Do nothing: ranks may take different numbers of steps, and meet in `synchronize`."""

    def begin(self, gradients: ReducedGradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        """Hand in this rank's gradients; return the number of rounds since the last step.

        Raise PluginError if there is no MPI, or if another mode has taken a step since; AgreementError if the
        ranks differ, TransportError if communication fails: on all ranks in the first step, later with their next.
        """
        def contribute() -> list[float]:
            start = time.perf_counter()
            self._pending.hand_in(gradients.pieces())
            self._accumulating.seconds = time.perf_counter() - start
            return [self._next_scheme.present_density, *settings]

        allreduce = self.start()
        base = self.reduction.ranks.base
        newest = next((each for each in reversed([*_running]) if each.reduction.ranks.base is base), self)
        if newest is not self:  # if no rounds are running, as they have ended, `arrive` says why
            raise PluginError(ONE_AT_A_TIME)
        self._note_rounds(allreduce.arrive(contribute))
        return len(self._to_apply)

    def prepare(self, gradients: ReducedGradients) -> Sequence[float]:
        update, settings = self._to_apply.popleft()
        start = time.perf_counter()
        gradients.write(update, cleared=False)
        assert self.report is not None
        self.report.phases["write_back"].seconds += time.perf_counter() - start
        return settings

    def synchronize(self, for_good: bool = False) -> Iterator[int]:
        """Serve rounds until all ranks are here; yield how many updates are to be applied, as they come."""
        for rounds in self.start().synchronize(for_good):
            before = len(self._to_apply)
            if rounds:
                self._note_rounds(rounds)
            yield len(self._to_apply) - before

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:  # noqa: ARG002
        """Raise PluginError, on this rank alone: the others' rounds go on, and wait for this rank in the end."""
        raise PluginError(message)

    def close(self) -> None:
        """End the thread, once all ranks have exited by `synchronize`: it has nothing to serve."""
        if self._allreduce is not None:
            allreduce, self._allreduce = self._allreduce, None
            allreduce.end()
            remove(self)

    def belongs_to(self, owner: object) -> None:
        """Let this rank exit when the owner is gone: it takes no more steps; all ends when all ranks have exited."""
        def drop() -> None:
            if self._allreduce is not None:
                self._allreduce.drop()

        weakref.finalize(owner, drop).atexit = False

    @contextmanager
    def meeting(self, doing: str) -> Iterator[CountingTransport]:
        """Meet as all modes do, and wait for all ranks: no round may begin while one uses the transport."""
        try:
            with super().meeting(doing) as transport:
                yield transport
        finally:
            barrier(self.reduction.ranks)

    def set_density(self, density: float | None) -> None:
        """Set the density from this rank's next contribution on. A round has that of the rank with its settings."""
        self._next_scheme = self._next_scheme.with_density(density)

    def start(self) -> PartialAllreduce:
        """Connect the ranks, and hold a first roll call. Collective."""
        if self._allreduce is None:
            transport = self.reduction.connect()
            signals = transport.signals()
            if signals is None or is_elastic():
                raise PluginError(NEEDS_MPI)  # a lone rank would not notice that others join
            options, limits = self.partial, StallLimits.of_horovod()
            transport.reset()
            self._allreduce = PartialAllreduce(options.policy, self._run, transport, signals, 1 + self._settings,
                                               options.seed, options.max_staleness,
                                               limits.end_of_wait(options.timeout), limits.end_of_wait(math.inf),
                                               functools.partial(remove, self))
            if not _running:
                atexit.unregister(end_all)
                atexit.register(end_all)  # after hvd.init, so before Horovod's own shutdown
            _running[self] = None
        return self._allreduce

    def _note_rounds(self, rounds: Sequence[Round]) -> None:
        ran = [(each, *each.outcome) for each in rounds if each.outcome is not None]
        reports = [report for *_, report in ran]
        last = reports[-1] if reports else self.report
        if last is not None:
            phases = {"accumulate": self._accumulating, "write_back": Traffic()}
            self._accumulating = Traffic()
            for name, traffic in (each for report in reports for each in report.phases.items()):
                phases[name] = phases.get(name, Traffic()) + traffic
            self.reduction.report = replace(
                last, phases=phases, rounds=len(rounds),
                active=tuple(presence == Presence.FRESH for each in rounds[-1:] for presence in each.presences),
                staleness=rounds[-1].staleness if rounds else (),
                seconds_saved=sum(each.seconds_saved for each in rounds))
        updates = []
        for each, update, _ in ran:
            if update is None:
                logger.warning("round %d was skipped, as some rank's gradient was not finite, or the ranks' sum; "
                               "look at the data, or lower the learning rate, if many are", each.number)
            else:
                updates.append((update, each.settings[1:]))
        self._to_apply.extend(updates if self.partial.in_order else updates[-1:])

    # In rounds.

    def _run(self, contributes: bool, settings: tuple[float, ...]) -> tuple[SparseVector | None, StepReport]:
        """Run a round. The update is None if it is skipped, as some rank's gradient was not finite, or the sum.

        What is pending stays pending, but what has overflowed together is dropped, as it would again.
        """
        reduction = self.reduction
        if settings[0] != reduction.scheme.present_density:
            reduction.set_density(settings[0])
        said = reduction.attendance(self._pending.is_finite or not contributes)
        outcome = reduction.outcome(self._pending.for_round(contributes), said)
        with reduction.writing(outcome.report):
            update = reduction.committed(outcome, self._pending.commit)  # what follows belongs to the next round
        if update is None and outcome.result is not None:
            self._pending.commit(outcome.result.contributed, None)
        if contributes:
            self._pending.is_finite = True
        return update, outcome.report

    # The state: what is pending counts as residual.

    def read_residual(self) -> Values:
        """Return a copy of this rank's residual and pending values."""
        return self._pending.read()

    def records(self) -> list[Record]:
        """Return this rank's record, made while no round runs."""
        with nullcontext() if self._allreduce is None else self._allreduce.paused():
            return [self.reduction.record(self.read_residual())]

    def restore(self, record: Record) -> None:
        """Raise PluginError once rounds run: other ranks would go on with this rank's earlier contribution."""
        if self._allreduce is not None:
            raise PluginError("with Partial a state is to be loaded before the first step: load it into a new "
                              "optimizer, on all ranks")
        self.reduction.restore(record)


# The end.

_running: dict[PartialMode, None] = {}
"""The modes whose rounds are not over, even those no longer used here: other ranks may need their service."""


def remove(mode: PartialMode) -> None:
    """Forget a mode whose rounds are over."""
    _running.pop(mode, None)  # both at the end of the program and in the thread


def end_all() -> None:
    """End the rounds of all modes. Collective.

    If this rank ends by an error, tell the others instead: their rounds would wait for this rank.
    """
    modes = sorted([*_running], key=lambda each: each.reduction.ranks.channel)
    _running.clear()
    how = unhappy_end() if modes else None
    if how is not None:
        leave(how)
        return
    for each in modes:
        try:
            for _ in each.synchronize(for_good=True):
                pass
            each.close()
        except OkTopkError as error:  # known on all ranks
            logger.error("the rounds of Partial could not be ended on all ranks together: %s", error)
        except Exception:
            logger.exception("the rounds of Partial could not be ended on all ranks together, so the job is ended")
            sys.stderr.flush()
            each.reduction.transport.abort()
