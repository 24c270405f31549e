"""The turns of blocks: all ranks know, without a message, which blocks of a vector come next."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..vectors.sparse import Indices, Values
from ..vectors.wire import BLOCK

FADING = np.float32(0.8)
"""Weight of the rate before, when a new one is known."""
FLOOR = 0.1
"""Rate, as a multiple of the mean rate, that each block has besides its own: so each comes at last."""
LEAST = 1e-30
"""Least such rate, if nothing moves."""
PARTS = 1 << 20
"""Number of parts of the largest rate in which rates are added up: whole numbers have one sum, in any order."""


@dataclass(frozen=True)
class Turns:
    """The blocks' turns: first come those in which most has piled up, as the steps before let expect.

    A block's rate is how far its sums moved in a step of late; infinity before its first turn. Its age is the number
    of steps since it came. What has piled up is about rate · age. All of it follows from sums that all ranks know, by
    operations whose bits depend neither on the processor nor on an order, so that all ranks know the same.
    """

    rates: NDArray[np.float32]
    """Shape (b,)."""
    ages: NDArray[np.uint16]
    """Shape (b,), from 1 on."""

    @staticmethod
    def of(n: int) -> Turns:
        """Return the turns of the blocks of n elements, none of which has come."""
        count = -(-n // BLOCK)
        return Turns(np.full(count, np.inf, np.float32), np.ones(count, np.uint16))

    def first(self, count: int) -> Indices:
        """Return the blocks that come next, in ascending order; of equal ones those of lower index."""
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
        rate = moved.astype(np.float32) / self.ages[blocks].astype(np.float32)
        rates[blocks] = np.where(np.isinf(before), rate, FADING * before + (1 - FADING) * rate)
        ages[blocks] = 1
        return Turns(rates, ages)

    def _floor(self) -> np.float32:
        known = self.rates[np.isfinite(self.rates)]
        largest = float(known.max(initial=0))
        if not largest:
            return np.float32(LEAST)
        parts = (known / np.float32(largest) * np.float32(PARTS)).astype(np.int64)
        return np.float32(max(FLOOR * largest * (int(parts.sum()) / PARTS / len(known)), LEAST))

    def record(self) -> dict[str, str]:
        """Return the turns in text, for a checkpoint."""
        return {"rates": b64encode(self.rates.tobytes()).decode(), "ages": b64encode(self.ages.tobytes()).decode()}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Turns:
        """Return what `record` wrote."""
        return Turns(np.frombuffer(b64decode(record["rates"]), np.float32),
                     np.frombuffer(b64decode(record["ages"]), np.uint16))
