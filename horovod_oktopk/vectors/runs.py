"""Places in runs of consecutive ones: not every place is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..kernels.numpy_kernels import Integers


@dataclass(frozen=True)
class Runs:
    """Ascending places, in runs of consecutive ones. Where there are few runs, they take little memory and time.

    `starts` has each run's first place, int64 of shape (r,), and `offsets` how many places come before each run, and
    in all: int64 of shape (r + 1,).
    """

    starts: Integers
    offsets: Integers

    @staticmethod
    def of_blocks(blocks: Integers, size: int, n: int) -> Runs:
        """Return the places of blocks of this size (ascending), of n elements: the last block may be shorter."""
        starts = size * blocks
        return Runs(starts, np.concatenate([[0], np.cumsum(np.minimum(size, n - starts))]).astype(np.int64))

    @staticmethod
    def joined(parts: Sequence[Runs]) -> Runs:
        """Return the places of parts that ascend."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return Runs(np.concatenate([part.starts for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def equals(self, other: Runs) -> bool:
        """Return True if the runs are the same."""
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.offsets, other.offsets)

    def __getitem__(self, part: slice) -> Runs:
        start, stop, _ = part.indices(len(self))
        first = max(int(np.searchsorted(self.offsets, start, "right")) - 1, 0)
        last = max(int(np.searchsorted(self.offsets, stop, "left")), first)
        starts, offsets = self.starts[first:last].copy(), self.offsets[first:last + 1]
        starts[:1] += start - offsets[:1]
        return Runs(starts, offsets.clip(start, max(start, stop)) - start)

    @cached_property
    def indices(self) -> Integers:
        """Return each place: int64, 8 bytes for each."""
        first: Integers = self.starts - self.offsets[:-1]  # less the number of places before the run
        if len(first) == 1:  # with one array of so many places
            return np.arange(first[0], first[0] + len(self))
        places: Integers = np.arange(len(self)) + np.repeat(first, np.diff(self.offsets))
        return places

    def numbers_below(self, bounds: Integers) -> Integers:
        """Return how many places lie below each bound."""
        run = np.searchsorted(self.starts, bounds, "right") - 1
        within = bounds - self.starts[run] if len(self.starts) else bounds
        numbers: Integers = np.where(run < 0, 0, np.minimum(self.offsets[run] + within, self.offsets[run + 1]))
        return numbers

    def shifted(self, by: int) -> Runs:
        """Return places that are larger by this number."""
        return Runs(self.starts + by, self.offsets)
