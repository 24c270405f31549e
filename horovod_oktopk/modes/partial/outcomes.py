"""The results of rounds for a step: updates to be applied, and one report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...schemes.report import StepReport, sum_of_phases
from ...transport.counting import Traffic
from ..mode import Update
from .rounds import Round
from .states import Presence


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
