"""The state of one optimizer's exchange, as checkpoints and elastic jobs see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..schemes.base import Unit
from ..transport.counting import CountingTransport
from ..transport.ranks import Ranks
from ..vectors.layout import Layout
from .records import THIS_PROCESS, Record, check_residuals, share_of


class Stateful(ABC):
    """The state of one optimizer's exchange on this rank: a residual and counters, for checkpoints and elastic jobs.

    unit: the residual's. copies: number of consecutive ranks that have the same residual. adds: True if workers'
    residuals are added up; False if they are averaged over the ranks.
    """

    layout: Layout
    ranks: Ranks
    unit: Unit = "gradients"
    copies: int = 1
    adds: bool = True

    @property
    @abstractmethod
    def description(self) -> str:
        """The options and parameters that must be equal on all ranks, one "name: value" a line."""

    @abstractmethod
    def connect(self) -> CountingTransport:
        """Return the transport to all ranks, for other ends than a step. Collective."""

    @abstractmethod
    def check_agreement(self, description: str) -> bool:
        """Hold a roll call alone, after `connect`; return True if all is finite on all ranks. Collective."""

    def leave(self) -> None:
        """Return when all ranks have used the transport for other ends than a step."""

    @abstractmethod
    def record(self) -> Record | None:
        """Return this rank's residual (a copy, NumPy) and counters; None before the first step."""

    def records(self) -> list[Record]:
        """Return this rank's record, for `load`; none before the first step."""
        own = self.record()
        return [] if own is None else [own]

    def load(self, records: Sequence[Record]) -> None:
        """Load this rank's share of the records that `record` returned on these or other ranks; none starts anew.

        If residuals are moves of parameters, the model is to hold the parameters that were shared by then.
        """
        check_residuals(records)
        self.take(share_of(records, *self.ranks.membership()[:2], self.layout, process=THIS_PROCESS, unit=self.unit,
                           copies=self.copies, adds=self.adds))

    @abstractmethod
    def take(self, share: Record) -> None:
        """Restore this rank's share of a saved state, as `share_of` returned it."""
