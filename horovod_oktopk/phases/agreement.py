"""The roll call that opens every step: one short allgather in which the ranks learn whether they agree.

Because it is held at every step, ranks that joined, resumed or were changed since the last one are
noticed before any payload moves, and NaN on one rank is known to all at no extra round trip.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import AgreementError

if TYPE_CHECKING:
    from ..transport.base import Transport

HEADER = 5


@dataclass(frozen=True)
class RollCall:
    """What all ranks said; equal on all of them."""

    step: int
    """The step counter: rank 0's."""
    finite: bool
    """Whether every rank's accumulator is finite."""
    in_sync: bool
    """Whether all ranks are at the same step and hold the state (thresholds, boundaries) of the steps before."""
    counts: NDArray[np.int64]
    """int64, shape (P, P): how many elements of rank i lie in region j."""


def roll_call(transport: Transport, description: str, k: int, step: int, finite: bool, state: int,
              counts: NDArray[np.int64]) -> RollCall:
    """Compares the ranks' descriptions and k, and shares the rest.

    description: everything that must be equal on all ranks, one "name: value" a line.
    state: a number for what is remembered of the steps before, 0 for nothing: settled ranks all have the same.
    counts: int64, shape (P,): this rank's elements by region.
    Raises AgreementError, with the same message on every rank, where the ranks differ.
    """
    header = np.array([_digest(description), k, step, finite, state], np.int64)
    rows = transport.allgather(np.concatenate([header, counts]))
    if (rows[:, :2] != rows[0, :2]).any():
        raise AgreementError(_difference(transport, f"{description}\nk: {k}"))
    steps, states = rows[:, 2], rows[:, 4]
    in_sync = bool(states[0] != 0 and (states == states[0]).all() and (steps == steps[0]).all())
    return RollCall(step=int(steps[0]), finite=bool(rows[:, 3].all()), in_sync=in_sync, counts=rows[:, HEADER:])


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
