"""What `synchronize_replicas` does, in every integration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from .reducer import in_turn


class Replica(Protocol):
    """What trains one model on this rank, by `Partial`."""

    def synchronize_replicas(self) -> Iterator[None]:
        """Serves rounds until all ranks are here, and applies their updates as they end; to be exhausted."""

    def average_models(self) -> None:
        """Makes the models equal where replicas drift apart; on all ranks together, once all are here."""


def synchronize(replicas: Sequence[Replica]) -> None:
    """Makes all replicas of these models equal; on all ranks together."""
    in_turn([each.synchronize_replicas() for each in replicas])
    for each in replicas:
        each.average_models()
