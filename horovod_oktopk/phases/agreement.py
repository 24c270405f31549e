"""The roll call that opens every step: one short allgather in which the ranks learn whether they agree.

Because it is held at every step, ranks that joined, resumed or were changed since the last one are
noticed before any payload moves, and NaN on one rank is known to all at no extra round trip.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import AgreementError
from ..transport.base import Transport, allgather_rows


class Memory(NamedTuple):
    """What a rank remembers of the steps before, in short: ranks in sync have the same."""

    complete: bool = False
    """Whether it remembers all that a step could need."""
    strategy: int = 0
    """How the step is reduced, and since which step it is tried: where there is a choice."""
    since: int = 0


NOTHING = Memory()


@dataclass(frozen=True)
class Attendance:
    """What one rank says at the roll call.

    description: everything that must be equal on all ranks, one "name: value" a line; so must k.
    step: its step counter. finite: whether its accumulator is.
    counts: int64: what the others must know of its selection; as many numbers on every rank.
    """

    description: str
    k: int
    step: int
    finite: bool = True
    memory: Memory = NOTHING
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def row(self) -> NDArray[Any]:
        """A record of whole words of 8 bytes, shape (1,)."""
        dtype = np.dtype([("description", np.int64), ("k", np.int64), ("step", np.int64), ("since", np.int64),
                          ("strategy", np.int32), ("complete", np.bool_), ("finite", np.bool_),
                          ("counts", np.int64, self.counts.shape)], align=True)
        row = np.zeros(1, dtype)
        row[0] = (_digest(self.description), self.k, self.step, self.memory.since, self.memory.strategy,
                  self.memory.complete, self.finite, self.counts)
        return row


@dataclass(frozen=True)
class RollCall:
    """What all ranks said; equal on all of them."""

    step: int
    """The step counter: rank 0's."""
    not_finite: tuple[int, ...]
    """The ranks whose accumulator is not finite."""
    in_sync: bool
    """Whether all ranks are at the same step, and remember the same (thresholds, boundaries) of the steps before."""
    counts: NDArray[np.int64]
    """int64, shape (P, m): every rank's."""

    @property
    def finite(self) -> bool:
        """Whether every rank's accumulator is."""
        return not self.not_finite


def roll_call(mine: Attendance, transport: Transport) -> RollCall:
    """Compares the ranks' descriptions and k, and shares the rest.

    Raises AgreementError, with the same message on every rank, where the ranks differ.
    """
    rows = allgather_rows(mine.row(), transport)[:, 0]
    if not _equal(rows, "description", "k"):
        raise AgreementError(_difference(transport, f"{mine.description}\nk: {mine.k}"))
    in_sync = bool(rows["complete"].all()) and _equal(rows, "step", "since", "strategy")
    not_finite = tuple(np.flatnonzero(~rows["finite"]).tolist())
    return RollCall(int(rows["step"][0]), not_finite, in_sync, rows["counts"])


def _equal(rows: NDArray[Any], *names: str) -> bool:
    """Whether all ranks said the same."""
    return all(bool((rows[name] == rows[name][0]).all()) for name in names)


def _digest(description: str) -> int:
    return int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "little", signed=True)


def _difference(transport: Transport, description: str) -> str:
    """Gathers the descriptions, and words the first difference that each rank has to rank 0."""
    message = np.frombuffer(description.encode(), np.uint8)
    sizes = transport.allgather(np.array([len(message)], np.int64))[:, 0]
    texts = [bytes(text).decode().splitlines() for text in transport.allgatherv(message, sizes)]
    found = [_first_difference(rank, texts[0], text) for rank, text in enumerate(texts) if text != texts[0]]
    shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more ranks" if len(found) > 4 else "")
    return ("the ranks of this reduction differ, and must not (options, and names, shapes and dtypes of the "
            f"parameters, are to be the same everywhere): {shown}")


def _first_difference(rank: int, reference: list[str], mine: list[str]) -> str:
    """Of the entries; k, which follows from them, comes last."""
    pairs = [*zip_longest(reference[:-1], mine[:-1], fillvalue="nothing"), (reference[-1], mine[-1])]
    expected, came = next((one, other) for one, other in pairs if one != other)
    return f"rank 0 has '{expected}', rank {rank} has '{came}'"
