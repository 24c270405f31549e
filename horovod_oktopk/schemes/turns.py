"""The turns of blocks: all ranks know, without a message, which blocks of a vector come next."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..vectors.sparse import Indices, Values

FADING = np.float32(0.8)
"""Weight of the rate before, when a new one is known."""
FLOOR = 0.1
"""The rate that each block has beside its own, as a multiple of the mean rate: so each comes in the end."""
LEAST = 1e-30
"""The least such rate: smaller ones would be lost to rounding."""
LARGEST = float(np.finfo(np.float32).max)
PARTS = 1 << 20
"""Number of parts of the largest rate in which rates are added up: whole numbers have one sum, in any order."""


@dataclass(frozen=True)
class Turns:
    """The blocks' turns: first come those in which most has probably piled up.

    A block's rate is how far its sums moved in a step of late; infinity before its first turn. Its age is the number
    of steps since it came. What has piled up is about rate · age. All of it follows from sums that all ranks know, by
    operations whose bits depend neither on the processor nor on an order, so that all ranks know the same.

    Args:
        rates: float32, shape (b,).
        ages: uint16, from 1 on, shape (b,).
    """

    rates: NDArray[np.float32]
    ages: NDArray[np.uint16]

    @staticmethod
    def new(count: int) -> Turns:
        """Return the turns of blocks none of which has come."""
        return Turns(np.full(count, np.inf, np.float32), np.ones(count, np.uint16))

    def next_blocks(self, count: int) -> Indices:
        """Return the blocks that come next, in ascending order. Of equal ones, those of lower index come first."""
        if count >= len(self.rates):
            return np.arange(len(self.rates))
        piled_up = (self.rates + self._floor()) * self.ages.astype(np.float32)
        least = np.partition(piled_up, -count)[-count]
        above, equal = np.flatnonzero(piled_up > least), np.flatnonzero(piled_up == least)
        return np.sort(np.append(above, equal[:count - len(above)]))

    def after(self, blocks: Indices, moved: Values) -> Turns:
        """Return the turns after these blocks have come. `moved` has the largest |sum| of each."""
        rates, before = self.rates.copy(), self.rates[blocks]
        ages = np.where(self.ages < np.iinfo(np.uint16).max, self.ages + np.uint16(1), self.ages)
        rate = moved.clip(max=LARGEST).astype(np.float32) / self.ages[blocks].astype(np.float32)
        rates[blocks] = np.where(np.isinf(before), rate, FADING * before + (1 - FADING) * rate)
        ages[blocks] = 1
        return Turns(rates, ages)

    def _floor(self) -> np.float32:
        known = self.rates[np.isfinite(self.rates)]
        largest = float(known.max(initial=0))
        if largest < LEAST:
            return np.float32(LEAST)
        parts = (known / np.float32(largest) * np.float32(PARTS)).astype(np.int64)
        return np.float32(max(FLOOR * largest * (int(parts.sum()) / PARTS / len(known)), LEAST))

    def digest(self) -> int:
        """Return a number of 32 bits that almost certainly differs if the turns do."""
        return zlib.crc32(self.ages.data, zlib.crc32(self.rates.data))

    def record(self) -> dict[str, str]:
        """Return the turns in text, for a checkpoint."""
        return {"rates": b64encode(self.rates.astype("<f4").tobytes()).decode(),
                "ages": b64encode(self.ages.astype("<u2").tobytes()).decode()}

    @staticmethod
    def from_record(record: Any) -> Turns:
        """Return what `record` wrote. Raise OptionError if it cannot be read."""
        try:
            rates = np.frombuffer(b64decode(record["rates"], validate=True), "<f4")
            ages = np.frombuffer(b64decode(record["ages"], validate=True), "<u2")
            if rates.shape == ages.shape:
                return Turns(rates.astype(np.float32), ages.astype(np.uint16))
        except (KeyError, TypeError, ValueError):
            pass
        raise OptionError(f"the state is damaged: the turns of its blocks are {record!r:.80}; load another one")
