"""`Partial`, in every integration: gradients are added to a residual, and rounds take from it.

So error feedback serves late ranks as well: values that such a rank could not contribute wait in its residual, and
the sum of all gradients equals the applied updates plus the residuals.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from ...errors import OkTopkError, PluginError
from ...schemes.report import StepReport, StepResult
from ...selection.accumulator import ResidualAccumulator
from ...state.records import Record
from ...transport.connect import barrier
from ...transport.counting import Traffic
from ...transport.mpi.ending import leave, unhappy_end
from ...transport.ranks import Ranks, StallLimits
from ...vectors.sparse import L, Values
from ..gradients import GradientMode
from ..mode import Gradients
from .options import NEEDS_MPI, Partial
from .pending import Outcome, Pending, Rounds, RoundUpdate, report_of, updates_of
from .rounds import PartialAllreduce

logger = logging.getLogger("horovod_oktopk")

ONE_AT_A_TIME = ("a second optimizer with Partial has taken a step, and this one takes another: ranks would wait for "
                 "each other in the rounds of both. Give the other one another compression, as OkTopk, or train them "
                 "one after the other")
IN_STEP_ONLY = ("with Partial the gradients are handed in by the optimizer's step, which may apply several updates: "
                "synchronize() and skip_synchronize() cannot be used, nor loss scaling (GradScaler, "
                "LossScaleOptimizer), whose scale would have to be one for all ranks. bfloat16 needs none")


class PartialMode(GradientMode[L]):
    """The reduction of the gradients of one layout in partial rounds; one object on each rank.

    The other arguments are GradientMode's.
    settings: names of the numbers that every rank gives with its gradients; a round uses those of one rank.
    """

    acts_at_step = has_rounds = True
    refused: ClassVar[Mapping[str, str]] = {
        "closure": "step(closure) cannot be used with Partial, which applies several updates, or none: call step() "
                   "without one",
        "synchronize": IN_STEP_ONLY, "scaler": IN_STEP_ONLY,
        "sparse": "sparse gradients go by Horovod's own allgather, which waits for all ranks: give "
                  "sparse_as_dense=True with Partial",
        "local": "a local variable cannot be used with Partial, whose steps apply several updates, or none: give "
                 "local layers an optimizer of their own"}

    def __init__(self, options: Partial, average: bool, layout: L,
                 make_accumulator: Callable[[L], ResidualAccumulator], ranks: Ranks,
                 settings: Sequence[str] = ()) -> None:
        self.partial = options
        self.drifts = not options.in_order
        self._wished = options.scheme
        own = [f"partial {name}: {value}" for name, value in options.settings().items()]
        signature = [*own, f"settings: {', '.join(settings)}", *layout.describe()]
        super().__init__(self._wished, average, layout, make_accumulator, ranks, signature)
        self._settings = len(settings)
        self._pending = Pending(self.accumulator, layout)
        self._allreduce: PartialAllreduce[Outcome] | None = None
        self._step_report: StepReport | None = None
        self._accumulating = Traffic()
        self._to_apply: deque[RoundUpdate] = deque()

    def reduce(self, gradients: Gradients, others_finite: bool = True) -> None:
        """Do nothing: rounds reduce."""

    def begin(self, gradients: Gradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        """Hand in this rank's gradients; return the number of rounds since the last step.

        Raise PluginError if there is no MPI, or if another mode has taken a step since; AgreementError if the
        ranks differ, TransportError if communication fails: on all ranks in the first step, later with their next.
        """
        def contribute() -> list[float]:
            start = time.perf_counter()
            self._pending.hand_in(gradients.pieces())
            self._accumulating.seconds = time.perf_counter() - start
            return [self._wished.density, *settings]

        allreduce = self.start()
        newest = next((each for each in reversed(_running) if each.ranks.base is self.ranks.base), self)
        if newest is not self:  # none is running where the rounds have ended: `arrive` says why
            raise PluginError(ONE_AT_A_TIME)
        self._take_note(allreduce.arrive(contribute))
        return len(self._to_apply)

    def prepare(self, gradients: Gradients) -> Sequence[float]:
        update = self._to_apply.popleft()
        start = time.perf_counter()
        gradients.write(update.update, cleared=False)
        assert self._step_report is not None
        self._step_report.phases["write_back"].seconds += time.perf_counter() - start
        return update.settings

    def synchronize(self, for_good: bool = False) -> Iterator[int]:
        """Serve rounds until all ranks are here; yield how many updates are to be applied, as they come.

        Then all gradients handed in have been in a round, and all ranks have seen the same rounds.
        """
        for rounds in self.start().synchronize(for_good):
            before = len(self._to_apply)
            if rounds:
                self._take_note(rounds)
            yield len(self._to_apply) - before

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:  # noqa: ARG002
        """Raise PluginError, on this rank alone: the others' rounds go on, and wait for this rank in the end."""
        raise PluginError(message)

    def meet(self, doing: str) -> None:
        """Do nothing: replicas meet when they are synchronized."""

    def close(self) -> None:
        """End the thread, once all ranks have exited by `synchronize`: it has nothing to serve."""
        if self._allreduce is not None:
            allreduce, self._allreduce = self._allreduce, None
            allreduce.end()
            remove(self)

    def belongs_to(self, owner: object) -> None:
        """Let this rank exit when the owner is gone: it takes no more steps, and all ends when all ranks have exited.

        The owner holds this object, and not the other way round.
        """
        def drop() -> None:
            if self._allreduce is not None:
                self._allreduce.drop()

        weakref.finalize(owner, drop).atexit = False

    @property
    def report(self) -> StepReport | None:
        """Report of this rank's last step, with all its rounds; None before the first."""
        return self._step_report

    def leave(self) -> None:
        """Wait for all ranks: no round may begin while some rank uses the transport for other ends."""
        barrier(self.ranks)

    def set_density(self, density: float | None) -> None:
        """Set the density from this rank's next contribution on.

        A round has the density of the rank that gives its settings.
        """
        self._wished = self._wished.with_density(density)

    def start(self) -> PartialAllreduce[Outcome]:
        """Connect the ranks, and hold a first roll call. Collective."""
        if self._allreduce is None:
            transport = self.connect()
            signals = getattr(transport.inner, "signals", None)
            if signals is None:
                raise PluginError(NEEDS_MPI)
            options, limits = self.partial, StallLimits.of_horovod()
            transport.reset()
            self._allreduce = PartialAllreduce(options.policy, self._run, transport, signals(), 1 + self._settings,
                                               options.seed, options.max_staleness,
                                               limits.patience(options.timeout), limits.patience(math.inf),
                                               functools.partial(remove, self))
            _serve(self)
        return self._allreduce

    def _title(self) -> str:
        return f"Partial({super()._title()}, policy={self.partial.policy!r})"

    def _take_note(self, rounds: Rounds) -> None:
        self._step_report = report_of(rounds, self._step_report, self._accumulating)
        if self._step_report is not None:
            self._accumulating = Traffic()
        for each in rounds:
            if each.outcome is not None and each.outcome.update is None:
                logger.warning("round %d was skipped, as some rank's gradient was not finite; "
                               "look at the data, or lower the learning rate, if many are", each.number)
        self._to_apply.extend(updates_of(rounds, only_latest=not self.partial.in_order))

    # In rounds.

    def _run(self, contributes: bool, settings: tuple[float, ...]) -> Outcome:
        reduction = self.reduction
        if settings[0] != reduction.scheme.density:
            super().set_density(settings[0])
        reduction.describe()
        self._before = self.algorithm.state()
        result = self.algorithm.reduce(
            self._pending.for_round(contributes), reduction.scheme.k_of(max(1, self.layout.n)),
            self._pending.is_finite or not contributes, reduction.transport)
        update = self._commit_or_undo(result)
        reduction.transport.reset()  # what follows belongs to the next round
        if contributes:
            self._pending.is_finite = True
        return Outcome(update, result.report)

    def _commit(self, result: StepResult) -> None:
        self._pending.commit(result)

    # The state: what is pending counts as residual.

    def read_residual(self) -> Values:
        """Return a copy of this rank's residual and pending values; see GradientMode."""
        return self._pending.read()

    def record(self) -> Record:
        """Return this rank's record, made while no round runs; see GradientMode."""
        if self._allreduce is None:
            return super().record()
        with self._allreduce.paused():
            return super().record()

    def take(self, share: Record) -> None:
        """Take the result of `share_of`, see GradientMode.

        Raise PluginError once rounds run: other ranks would go on with this rank's earlier contribution.
        """
        if self._allreduce is not None:
            raise PluginError("with Partial a state is to be loaded before the first step: load it into a new "
                              "optimizer, on all ranks")
        super().take(share)


# The end.

_running: list[PartialMode[Any]] = []
"""The modes whose rounds are not over, even those no longer used here: other ranks may need their service."""


def _serve(mode: PartialMode[Any]) -> None:
    if not _running:
        atexit.unregister(end_all)
        atexit.register(end_all)  # after hvd.init, so before Horovod's own shutdown
    _running.append(mode)


def remove(mode: PartialMode[Any]) -> None:
    """Forget a mode whose rounds are over."""
    with contextlib.suppress(ValueError):  # both at the end of the program and in the thread
        _running.remove(mode)


def end_all() -> None:
    """End the rounds of all modes. Collective.

    If this rank ends by an error, tell the others instead: their rounds would wait for this rank.
    """
    modes = sorted(_running, key=lambda each: each.ranks.channel)
    _running.clear()
    how = unhappy_end() if modes else None
    if how is not None:
        leave(how)
        return
    for each in modes:
        _end(each)


def _end(mode: PartialMode[Any]) -> None:
    try:
        for _ in mode.synchronize(for_good=True):
            pass
        mode.close()
    except OkTopkError as error:  # known on all ranks
        logger.error("the rounds of Partial could not be ended on all ranks together: %s", error)
    except Exception:
        logger.exception("the rounds of Partial could not be ended on all ranks together, so the job is ended")
        sys.stderr.flush()
        getattr(mode.reduction.transport.inner, "abort", lambda: None)()
