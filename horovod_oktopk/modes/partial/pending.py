"""The gradients that a rank has handed in since it last contributed to a round, and results of rounds for a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...schemes.report import StepReport, StepResult, sum_of_phases
from ...selection.accumulator import Accumulator, EmptyAccumulator, ResidualAccumulator
from ...transport.counting import Traffic
from ...vectors.sparse import Layout, SparseVector, Values, sum_of
from ..mode import Piece, Update
from .rounds import Round
from .states import Presence

NOWHERE = np.empty(0, np.int64)


class Pending:
    """Residual + gradients of one rank. `accumulator` holds them from `hand_in` until a round commits them.

    is_finite: True if all gradients were since this rank last contributed.
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
            self._accumulator.commit(NOWHERE)
        self._is_held = self._accumulator.accumulate(pieces)
        self.is_finite = self.is_finite and self._is_held

    def for_round(self, contributes: bool) -> Accumulator:
        """Return what this rank gives to a round: an accumulator of nothing if it does not contribute."""
        self._contributes = contributes and self._is_held
        return self._accumulator if self._contributes else self._nothing

    def commit(self, result: StepResult) -> None:
        """Commit a round. Its remainder: rounding errors of this rank's selection and of sums that it rounded."""
        remainder = result.remainder
        if remainder is not None and len(remainder):
            self._remainders.append(remainder)
        if self._contributes:
            self._accumulator.commit(result.contributed, sum_of(self._remainders) if self._remainders else None)
            self._remainders.clear()
            self._is_held = False

    def read(self) -> Values:
        """Return a copy of the residual and all that waits: shape (n,)."""
        values = self._accumulator.values().copy() if self._is_held else self._accumulator.read_residual()
        for remainder in self._remainders:
            values[remainder.indices] += remainder.values
        return values


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round.

    update: None if some rank's gradient was not finite: it is dropped, and residuals are unchanged.
    """

    update: Update | None
    report: StepReport


Rounds = Sequence[Round[Outcome]]


@dataclass(frozen=True)
class RoundUpdate:
    """One step of the inner optimizer. settings: the numbers that belong to its round."""

    update: Update
    settings: tuple[float, ...]


def updates_of(rounds: Rounds, only_latest: bool) -> list[RoundUpdate]:
    """Return the updates to be applied, in order. only_latest: leave out all rounds but the last."""
    return [RoundUpdate(each.outcome.update, each.settings[1:]) for each in (rounds[-1:] if only_latest else rounds)
            if each.outcome is not None and each.outcome.update is not None]


def report_of(rounds: Rounds, before: StepReport | None, accumulate: Traffic) -> StepReport | None:
    """Return the report of a step that takes these rounds; None if no round has reduced anything yet.

    before: the last report. accumulate: the time taken to hand in the step's gradients. Nothing has been written back
    yet.
    """
    reports = [each.outcome.report for each in rounds if each.outcome is not None]
    last = reports[-1] if reports else before
    if last is None:
        return None
    own = {"accumulate": accumulate, "write_back": Traffic()}
    return replace(
        last, phases=sum_of_phases([*(report.phases for report in reports), own]), rounds=len(rounds),
        active=tuple(presence == Presence.FRESH for each in rounds[-1:] for presence in each.presences),
        staleness=rounds[-1].staleness if rounds else (),
        seconds_saved=sum(each.seconds_saved for each in rounds))
