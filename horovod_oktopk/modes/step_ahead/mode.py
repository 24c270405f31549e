"""Step-ahead error feedback, step after step: the part that every integration has in common.

Invariant: the residual of this rank is w - p, and is stored nowhere. w has the same bits on all ranks. A step:

    begin       the exchange under way is applied, if `catch_up` has not done it between the passes of this step:
                w -= u / (λP); p += c - u / (λP), where c is this rank's contribution to u. So w - p is the new
                residual again, but for `Scheme.overshoot_of_p`. A few elements of the gradient are read: the
                ranks' own noise gives the gain.
    (the optimizer's own local step on p, with λ · gain times its learning rate)
    end         acc = w - p is read, and its top k are selected; u = Topk(Σ Topk(acc)) is under way. Until it
                is applied, p has moved by (1 - 1/λ) times the selected values: to the place where the exchange
                would take it, if all ranks had selected the same.

While an exchange is under way only the program itself moves p: whatever it does to p is a local step.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np

from ...errors import NonFiniteError, PluginError
from ...schemes.algorithm import Memory
from ...schemes.options import Scheme
from ...selection.parameter_accumulator import ParameterAccumulator
from ...selection.replica import Replica
from ...state.records import Record, Residuals
from ...transport.counting import CountingTransport
from ...transport.ending import note_status, unhappy_end
from ...transport.ranks import Ranks
from ...vectors.layout import Layout
from ...vectors.sparse import Values
from ..gradients import LocalGradients
from ..mode import Mode
from ..options import StepAhead
from ..reduction import Reduction
from . import messages
from .life import Event, Life
from .model import Exchange, Model
from .pace import SUMS, GradientNoise, gain_of, sample

logger = logging.getLogger("horovod_oktopk")

OF_ONE_RANK: Mapping[str, Any] = {"shared": None, "steps": 0, "noise": None}
"""Fields of this mode's records alone, as one rank has them: a digest of w, by which a restored state knows its
parameters; the steps since the last exchange; and GradientNoise. `start` takes them."""
GAVE_WAY = ""
"""In place of the digest: another optimizer may have moved w since."""
LAST_EXCHANGE = 60.0
"""Seconds for which a rank that shuts Horovod down waits for the exchange under way."""


class StepAheadMode(Mode[LocalGradients]):
    """The shared parameters w of one model, and the exchanges of w - p; one object on each rank.

    The ranks' moves are averaged if `average`, and summed otherwise. The accumulator holds w.
    `normalizes` is True if the optimizer normalizes its gradients, as Adam does.
    Raise PluginError for parameters in 16 bits, or of several dtypes.
    """

    reads_memory = True
    refused = messages.REFUSED

    def __init__(self, options: StepAhead, average: bool, layout: Layout, accumulator: ParameterAccumulator,
                 replica: Replica, ranks: Ranks, normalizes: bool = False) -> None:
        for name, _, dtype in layout.entries:
            if dtype not in ("float32", "float64"):
                raise PluginError(messages.NARROW.format(name=name, dtype=dtype))
            if dtype != layout.entries[0][2]:
                raise PluginError(messages.SEVERAL.format(name=name, dtype=dtype, first=layout.entries[0]))
        gain = "measured" if options.gain == "auto" and normalizes else f"{gain_of(options.gain, 1.0):g}"
        title = f"StepAhead({type(options.scheme).__name__}), gain {gain}"
        super().__init__(Reduction(options.scheme, layout, ranks, title, self._describe, "parameters", SUMS,
                                   self._begin_anew),
                         Residuals(layout, ranks, "parameters", not average, options.scheme.hierarchical))
        self.options, self._normalizes = options, normalizes
        self._noise = GradientNoise()
        self._sample: Values | None = None  # that this rank tells of its gradient; None if the step is not measured
        self._model = Model(accumulator, replica)
        self._exchange = Exchange(self.reduction, self._model, self.residuals.adds)
        self._rank, self._workers = 0, 1
        self._steps = 0  # of the optimizer, since the last exchange began
        self._saved: Record | None = None  # which waits while the life is LOADED or SUSPENDED
        self._never_shared = True
        note_status()
        _live.add(self)

    @property
    def gain(self) -> float:  # type: ignore[override]
        """A factor on the optimizer's steps, but not on those of decoupled weight decay."""
        return 1.0 if self.reduction.is_alone else self._gain

    @property
    def _gain(self) -> float:
        """The gain among several ranks."""
        return gain_of(self.options.gain, self._noise.ratio if self._normalizes else 1.0)

    @property
    def is_started(self) -> bool:  # type: ignore[override]
        return self._model.life.is_started

    @property
    def holds_own(self) -> bool:  # type: ignore[override]
        return self.is_started and not self._model.life.is_shown

    # A step.

    def begin(self, gradients: LocalGradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        """Apply the exchange under way, if the next one is due; return 1.

        Return 0, and this rank joins the exchange without a local step, if its gradients are not finite or it has
        adopted rank 0's parameters. The only rank returns 0 only where a loss scaler skips the step.
        Raise the error of the exchange under way, if any.
        """
        if self._model.life.is_shown:
            raise PluginError(messages.INSIDE)
        reduction = self.reduction
        reduction.reset_if_membership_changed()
        if reduction.is_alone:  # this rank's own parameters are those that all ranks share
            self.catch_up()
            reduction.connect()
            if self._saved is not None:
                self.start()
            self._model.passes(Event.RESET)
            self.coefficient, finite = 1.0, gradients.all_finite()
            reduction.memory, reduction.report = reduction.step_alone(finite)
            return int(finite or not scaled)
        if not self.is_started:
            self.start()
        has_adopted = self._model.life is not Life.STEPPING and self._agree()
        is_due = self._steps + 1 >= self.options.local_steps
        if is_due:
            self.catch_up()
        steps = not has_adopted and gradients.all_finite()
        if not steps:
            text = messages.ADOPTED if has_adopted else messages.SCALED if scaled else messages.SKIPPED
            logger.log(logging.WARNING if text is messages.SKIPPED else logging.INFO, text, self._rank)
        n = reduction.layout.n
        is_measured = steps and is_due and n and self._workers > 1
        self._sample = sample(gradients.elements, n, reduction.memory.step, self._normalizes) if is_measured else None
        return int(steps)

    def end(self) -> None:
        """Begin an exchange after the local step, if one is due."""
        if not self.is_started:  # the only rank
            return
        self._steps += 1
        if self._steps >= self.options.local_steps:
            self._steps = 0
            self._exchange.begin(self.coefficient, self.options.scheme.overshoot_of_p(self._workers), self._sample,
                                 anticipate=self.options.overlap)
            if not self.options.overlap:
                self.catch_up()

    def catch_up(self) -> None:
        """Wait for the exchange under way, and apply it, if there is one; on this rank alone.

        Raise AgreementError, NonFiniteError or TransportError if the exchange did.
        """
        outcome = self._exchange.finish()
        if outcome is None:
            return
        (reduced, moves), reduction = outcome, self.reduction
        reduction.note(reduced)
        if reduced.measured is not None:
            self._noise.note(reduced.measured)
        report = reduced.report
        report.gain, report.noise_ratio, report.noise_scale = self._gain, self._noise.ratio, self._noise.scale
        if reduced.not_finite:
            raise NonFiniteError(messages.NOT_FINITE.format(ranks=list(reduced.not_finite)))
        if moves is None:  # on all ranks alike
            raise NonFiniteError(messages.OVERFLOW)
        reduction.memory = reduced.memory
        with reduction.writing(report):
            self._model.apply(*moves)

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:  # noqa: ARG002
        """Raise PluginError; if the other ranks do not refuse as well, all raise AgreementError.

        The exchange under way is awaited, but not applied.
        """
        self._exchange.wait()
        self.reduction.connect()
        self.reduction.check_agreement(f"{self.reduction.description}\n{message}")
        raise PluginError(message)

    # The beginning, and new ones.

    def start(self) -> None:
        """Take the model's parameters as w; if a state was loaded, set p to w - residual. On this rank alone."""
        copies, was_loaded = self.residuals.copies, self._model.life is Life.LOADED
        self._model.start(copies)
        self._rank, size, _ = self.reduction.ranks.membership()
        self._workers, self._steps = size // copies, 0
        self._set_coefficient()
        saved, self._saved = self._saved, None
        if saved is None:
            return
        if saved["shared"] not in (None, GAVE_WAY, self._model.digest):
            warnings.warn(messages.OTHER_PARAMETERS if was_loaded else messages.CHANGED, stacklevel=2)
            return
        self.reduction.memory = Memory.from_record(saved["algorithm"])
        self._steps, self._model.copies = saved["steps"], saved["copies"]
        if was_loaded:  # else the search for the density goes on
            self.reduction.measure_from(saved["level"])
        if saved["noise"] is not None:  # of a rank that was alone
            self._noise = GradientNoise(**saved["noise"])
        residual, coefficient = saved["residual"], saved["coefficient"]
        if coefficient and coefficient != self.coefficient:
            residual = residual * residual.dtype.type(self.coefficient / coefficient)
        self._model.set_residual(residual)

    def _agree(self) -> bool:
        """Check that the shared parameters w and the options are the same on all ranks. Collective.

        That is done at the first step, and at the next after w or the ranks have changed.
        Rank 0's statistics for the gain become those of all ranks. Return True if this rank has adopted rank 0's
        parameters.
        """
        reduction, (adopts, self.adopts) = self.reduction, (self.adopts, False)
        options = reduction.description
        said = options if adopts else f"{options}\n{messages.BROADCAST_FIRST}: {self._model.digest}"
        everyone = reduction.connect()
        reduction.check_agreement(said)
        self._workers = reduction.ranks.membership().size // self.residuals.copies
        self._set_coefficient()
        has_adopted = adopts and self._model.adopt(everyone)
        if has_adopted:
            self.start()
        self._noise.become_alike(everyone, self._workers)
        if reduction.worker.within is not None:
            self._model.become_alike(reduction.worker.within, self.residuals.adds)
        self._model.passes(Event.AGREE)
        return has_adopted

    def _set_coefficient(self) -> None:
        self.coefficient = (1.0 if self.reduction.is_alone
                            else self.options.coefficient(self._workers, self._normalizes))

    def _begin_anew(self) -> None:
        """Drop the exchange under way, and begin anew at the next step, among other ranks."""
        self._exchange.drop()
        self._model.take_back()
        self.suspend()
        if self._saved is not None:  # its regions are those of the ranks before; steps that a new rank did not take
            step = {"step": self._saved["algorithm"]["step"]}
            self._saved = self._saved | {"algorithm": step, "level": 0, "steps": 0}

    def suspend(self, for_another: bool = False) -> None:
        """Put w into the model until the next step begins anew; keep what this rank has not sent.

        `for_another` tells that another optimizer may move w in between.
        """
        if self.is_started:
            [self._saved] = self.records()
            self._model.suspend()
        if for_another and self._saved is not None:
            self._saved = self._saved | {"shared": GAVE_WAY}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Put w into the model inside the block, to be read; restore this rank's own parameters afterwards.

        A state may be loaded inside, and the model's w with it; `resume` follows then. If the program changes w
        inside, it must do so on all ranks alike, which the next step checks; what this rank has not sent stays.
        """
        self._never_shared = False
        model = self._model
        if model.life.is_shown:
            yield
            return
        if self.is_started:
            self.catch_up()
            model.show()
        try:
            yield
        finally:
            if model.life.is_shown and not sys.is_finalizing():  # if left open, its tensors may be gone by then
                model.hide()

    def resume(self, make_way: Callable[[], None] = lambda: None) -> None:
        """See Mode: the model holds p = w - residual again. The next step does so in any case."""
        if self._saved is not None and self._saved["shared"] != GAVE_WAY:
            make_way()
            self.start()

    # The state.

    def records(self) -> list[Record]:
        """Return this rank's residual w - p (NumPy) and counters, for `load`; none before the first step.

        The exchange under way is applied, and p becomes w - residual, as it will be after loading. So a resumed run
        has the same bits.
        """
        if not self.is_started:
            return [self._saved] if self._saved else self._records_alone()
        model, is_shown = self._model, self._model.life.is_shown
        if is_shown:
            model.swap()
            model.follow()
        self.catch_up()
        residual = model.settled_residual()
        model.update_digest()
        if is_shown:
            model.swap()
        reduction = self.reduction
        own = self.residuals.record_of(residual, reduction.memory.record(), self.coefficient, model.copies,
                                       reduction.control.found)
        return [{**own, "shared": model.digest, "steps": self._steps, "noise": asdict(self._noise)}]

    def _records_alone(self) -> list[Record]:
        """Return the record of the only rank, which has nothing that it has not sent; none before its first step."""
        reduction = self.reduction
        if not reduction.is_alone or self.report is None:
            return []
        nothing = np.zeros(reduction.layout.n, reduction.layout.dtype)
        own = self.residuals.record_of(nothing, {"step": reduction.memory.step}, 1.0)
        return [{**own, **OF_ONE_RANK}]

    def restore(self, record: Record) -> None:
        """Take a record, for when `shared` ends or the next step begins."""
        self._exchange.drop()  # the state is of another step
        self._model.anticipated = None
        self._model.passes(Event.LOAD)
        self._saved = {**OF_ONE_RANK, **record}

    # The ranks.

    @contextmanager
    def meeting(self, doing: str) -> Iterator[CountingTransport]:
        """Meet as all modes do, after applying the exchange under way."""
        self.catch_up()
        with super().meeting(doing) as transport:
            yield transport

    def _describe(self, scheme: Scheme) -> str:
        """Return what must be equal on all ranks, one "name: value" a line."""
        values = {**self.options.settings(), **scheme.settings("parameters")}
        return "\n".join([f"compression: StepAhead({type(scheme).__name__})",
                          *(f"{name}: {value}" for name, value in values.items()),
                          f"optimizer: normalizes its gradients: {self._normalizes}",
                          f"op: {'Sum' if self.residuals.adds else 'Average'}",
                          *self.residuals.layout.describe_memory()])

    def close(self) -> None:
        """Wait for the exchange under way, and leave it; call this before Horovod is shut down."""
        self._exchange.wait(LAST_EXCHANGE)
        has_stepped = self.is_started and self.report is not None
        if has_stepped and self._never_shared and self._rank == 0 and unhappy_end() is None:
            self._never_shared = False  # told once
            logger.warning(messages.NEVER_SHARED)


_live: weakref.WeakSet[StepAheadMode] = weakref.WeakSet()


def close_all() -> None:
    """Wait for the exchanges that are under way in this process."""
    for mode in list(_live):
        mode.close()
