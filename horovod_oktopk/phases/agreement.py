"""The roll call that opens every step: one short allgather in which the ranks learn whether they agree.

Because it is held at every step, ranks that joined, resumed or were changed since the last one are
noticed before any payload moves, and NaN on one rank is known to all at no extra round trip.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import AgreementError
from ..transport.base import Counts, Transport, Values, allgather_rows, alltoall_rows

Words = NDArray[np.uint32]

FEW_RANKS = 16
"""Ranks up to which all ranks are told everything: one round of messages less, and no more bytes than O(P)."""
FINITE = 1
"""Flag of a row's last word."""
LEVEL_FACTOR, LEVEL_MASK = 1 << 1, 0x3E
"""The place, in a row's last word, of the level that a rank tells."""
MEMORY_FACTOR, MEMORY_MASK = 1 << 6, 0xFFFC0
"""The place of the digest of a rank's memory."""
RATES_SHIFT = 20
"""The bit from which on the word tells the rank's learning rates."""
NOW, STEP = "now: ", "take a step"
"""Beginning of the line that names a rank's action in a description; and the action of a rank without such a line."""
PARTED = ("the ranks do different things, and would wait for each other for ever: {}. All ranks must take the same "
          "number of steps, and do together what is for all of them")


class Measured(NamedTuple):
    """Measurements of `size` ranks; the same bits on all of them."""

    total: Values
    """The sums of their numbers: float64, shape (m,)."""
    squares: float
    """The sum of all numbers' squares."""
    size: int


@dataclass(frozen=True)
class Attendance:
    """One rank's entry in the roll call.

    Args:
        description: everything that must be equal on all ranks, one "name: value" a line; so must k.
        step: its step counter.
        finite: True if its accumulator is.
        memory: a digest, of 14 bits, of what the rank remembers of earlier steps (thresholds, boundaries); 0 if that
            is not all that a step could need.
        counts: int64, the numbers that others need of its selection: one for all of them, or one for each rank.
        sample: float32, shape (m,), the same m on all ranks: its measurements, for `RollCall.measured`.
        rates: a digest of its learning rates, of 12 bits; see `digest_of_rates`.
        level: a number below 32, of rank 0; 0 for nothing, as on all other ranks.
    """

    description: str
    k: int
    step: int = 0
    finite: bool = True
    memory: int = 0
    counts: Counts = field(default_factory=lambda: np.empty(0, np.int64))
    sample: Values = field(default_factory=lambda: np.empty(0, np.float32))
    rates: int = 0
    level: int = 0

    @property
    def text(self) -> str:
        return f"{self.description}\nk: {self.k}"


@dataclass(frozen=True)
class RollCall:
    """The entries of all ranks; equal on all of them, except `counts` on many ranks."""

    step: int
    """The step counter: rank 0's, or this rank's own, if they are at the same step."""
    not_finite: tuple[int, ...]
    """The ranks whose accumulator is not finite."""
    in_sync: bool
    """True if all ranks are at the same step, and remember the same of those before: all that a step could need."""
    counts: Counts
    """See `tell`."""
    measured: Measured | None
    """The measurements of all ranks; None if there are none, or not at the same step."""
    same_rates: bool = True
    """False if the ranks have different learning rates."""
    level: int = 0
    """The level that rank 0 tells."""

    @property
    def finite(self) -> bool:
        return not self.not_finite


def roll_call(mine: Attendance, transport: Transport) -> RollCall:
    """Compare the ranks' descriptions and k, and share the rest. Collective.

    Raise AgreementError, with the same message on every rank, if the ranks differ.
    """
    rows, counts, samples = _rows(mine, transport)
    if not (rows[:, :2] == rows[0, :2]).all():
        raise AgreementError(_difference(transport, mine.text))
    steps, memories, rates = rows[:, 2], rows[:, 3] & np.uint32(MEMORY_MASK), rows[:, 3] >> np.uint32(RATES_SHIFT)
    is_same_step = bool((steps == steps[0]).all())
    in_sync = is_same_step and bool(memories[0]) and bool((memories == memories[0]).all())
    not_finite = tuple(np.flatnonzero(~rows[:, 3] & FINITE).tolist())
    measured = None
    if len(mine.sample):
        told = (mine.sample[None] if samples is None else samples).astype(np.float64)
        sums = np.append(told.sum(axis=0), np.square(told).sum())
        sums = transport.allreduce(sums) if samples is None else sums
        measured = Measured(sums[:-1], float(sums[-1]), transport.size)
    return RollCall(mine.step if is_same_step else int(steps[0]), not_finite, in_sync, counts,
                    measured if is_same_step else None, bool((rates == rates[0]).all()),
                    int(rows[0, 3] & LEVEL_MASK) // LEVEL_FACTOR)


def _rows(mine: Attendance, transport: Transport) -> tuple[Words, Counts, Values | None]:
    """Return every rank's row, counts as `tell` returns them, and on few ranks every rank's sample; otherwise None.

    Row: two words of the digest of the text, the step, and a flag with the level and the digests of memory and rates.
    Samples: float32, shape (P, m). If each of many ranks has counts of its own, every one gets a copy of the row;
    then one word stands for it: a checksum, with the flag FINITE as it is. Where the checksums are equal, all rows
    are this rank's own but for that flag; where they differ, rows are gathered.
    """
    last = (FINITE * mine.finite | LEVEL_FACTOR * mine.level | MEMORY_FACTOR * mine.memory
            | mine.rates << RATES_SHIFT)
    row = np.array([*_digest(mine.text), mine.step & 2**32 - 1, last], np.uint32)
    if transport.size <= FEW_RANKS:
        told, counts = tell(np.concatenate([row, mine.sample.view(np.uint32)]), mine.counts, transport)
        return told[:, :len(row)], counts, np.ascontiguousarray(told[:, len(row):]).view(np.float32)
    if len(mine.counts) <= 1:
        return *tell(row, mine.counts, transport), None
    *others, _ = row.tolist()
    word = zlib.crc32(repr((*others, last & ~FINITE)).encode()) & ~FINITE | last & FINITE
    words, counts = tell(np.array([word], np.uint32), mine.counts, transport)
    digests = words & ~np.uint32(FINITE)
    if (digests != digests[0]).any():
        return allgather_rows(row, transport), counts, None
    rows = np.tile(row, (transport.size, 1))
    rows[:, -1] = rows[:, -1] & ~np.uint32(FINITE) | words[:, 0] & FINITE
    return rows, counts, None


def tell(row: Words, counts: Counts, transport: Transport) -> tuple[Words, Counts]:
    """Return every rank's row, shape (P, length); and counts for this rank, or all: int64, shape (P, m). Collective.

    `counts` holds one number for all ranks, or one for each. On up to FEW_RANKS ranks all are told, m = P, so that
    every rank knows what the others will send. On more, a rank is told those for itself, m = 1, as P² numbers would
    outgrow the k elements.
    """
    words, length = counts.astype(np.uint32), len(row)
    if len(counts) <= 1 or transport.size <= FEW_RANKS:
        rows = allgather_rows(np.concatenate([row, words]), transport)
    else:
        rows = alltoall_rows(np.column_stack([np.tile(row, (transport.size, 1)), words]), transport)
    return rows[:, :length], rows[:, length:].astype(np.int64)


def digest_of_rates(rates: Sequence[float]) -> int:
    """Return a digest of learning rates in 12 bits."""
    return zlib.crc32(np.asarray(rates, np.float64).tobytes()) >> 20


@functools.lru_cache(maxsize=64)
def _digest(text: str) -> Words:
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32)


def _difference(transport: Transport, description: str) -> str:
    message = np.frombuffer(description.encode(), np.uint8)
    sizes = transport.allgather(np.array([len(message)], np.int64))[:, 0]
    texts = [bytes(text).decode().splitlines() for text in transport.allgatherv(message, sizes)]
    doing = [next((line.removeprefix(NOW) for line in text if line.startswith(NOW)), STEP) for text in texts]
    if len(set(doing)) > 1:
        return PARTED.format(", ".join(f"ranks {[rank for rank, each in enumerate(doing) if each == one]} {one}"
                                       for one in dict.fromkeys(doing)))
    found = [_first_difference(rank, texts[0], text) for rank, text in enumerate(texts) if text != texts[0]]
    shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more ranks" if len(found) > 4 else "")
    return ("ranks disagree on options or parameters (names, shapes, dtypes), which must be the same everywhere: "
            f"{shown}")


def _first_difference(rank: int, reference: list[str], mine: list[str]) -> str:
    """Describe the first entry that differs; k, which follows from the others, comes last."""
    pairs = [*zip_longest(reference[:-1], mine[:-1], fillvalue="nothing"), (reference[-1], mine[-1])]
    expected, came = next((one, other) for one, other in pairs if one != other)
    return f"rank 0 has '{expected}', rank {rank} has '{came}'"
