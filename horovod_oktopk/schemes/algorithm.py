"""A scheme's algorithm: two functions over values, `select` and `exchange`. Its memory is a value, too."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError
from ..phases.link import Link
from ..selection.accumulator import Accumulator
from ..selection.local_top_k import local_top_k
from ..selection.selection import Selection
from ..transport.base import Counts, Transport
from ..vectors.sparse import Indices, SparseVector
from ..vectors.wire import Format
from .turns import Turns

EVERYTHING = slice(None)
NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class Memory:
    """A rank's memory of the steps before. A step that fails drops its new memory, and the old one stays."""

    step: int = 0
    """Number of steps taken."""
    boundaries: Indices | None = None
    """Offsets of the regions; None if they are to be found anew."""
    threshold: float | None = None
    """The last global threshold; None if it is to be found anew."""
    turns: Turns | None = None
    """The blocks' turns; None if they begin anew."""

    def digest(self) -> int:
        """Return a digest of 14 bits for the roll call; 0 if a step could need more than this of the steps before."""
        if self.boundaries is None or self.threshold is None:
            return 0
        return (zlib.crc32(self.boundaries.tobytes(), zlib.crc32(np.float64(self.threshold).tobytes())) >> 18) or 1

    def forgotten(self) -> Memory:
        """Return what does not depend on who the ranks are."""
        return Memory(self.step)

    def for_workers(self, number: int) -> Memory:
        """Return what so many workers can use of this."""
        return self if self.boundaries is None or len(self.boundaries) == number + 1 else self.forgotten()

    def record(self) -> dict[str, Any]:
        """Return all of it in plain numbers and lists, for a checkpoint."""
        return {"step": self.step, "global_threshold": self.threshold,
                "boundaries": None if self.boundaries is None else self.boundaries.tolist(),
                "turns": None if self.turns is None else self.turns.record()}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Memory:
        """Return what `record` wrote. A record with the step alone is one of other ranks.

        Raise OptionError if it cannot be read.
        """
        boundaries, threshold, turns = (record.get(name) for name in ("boundaries", "global_threshold", "turns"))
        try:
            if boundaries is not None:
                boundaries = np.array(boundaries, np.int64).reshape(len(boundaries))
                if boundaries[0] or (np.diff(boundaries) < 0).any():
                    raise ValueError
            threshold = None if threshold is None else float(threshold)
        except (TypeError, ValueError, IndexError, OverflowError):
            raise OptionError(f"the state is damaged: the regions' boundaries are {boundaries!r:.80}, and the "
                              f"threshold is {threshold!r:.80}; load another one") from None
        return Memory(record["step"], boundaries, threshold, None if turns is None else Turns.from_record(turns))


@dataclass(frozen=True)
class Call:
    """The roll call's result for an exchange: all workers know it."""

    t: int
    """The number of the step, from 1."""
    in_sync: bool
    """True if all ranks have taken the same steps, and have the same memory, which is complete."""
    counts: Counts
    """The workers' counts; see `agreement.tell`."""
    n: int
    """Number of elements of a vector."""
    k: float
    """Number of elements that the mean worker has selected, at most."""
    kept: int
    """k', the number of elements to keep of the sum."""
    k_as_kept: float
    """k; of a host's slice, k in proportion to its k': slices divide among them what the bound leaves."""
    lengths: Counts
    """Number of elements that each rank has selected, at most: shape (P,)."""


@dataclass(frozen=True)
class Result:
    """The result of an exchange on one rank."""

    update: SparseVector
    """The sparse sum, the same bits on every rank."""
    reached: Indices | slice | None
    """Indices of this rank's selection that the update has; EVERYTHING: all of acc; None: all selected."""
    memory: Memory
    selected: SparseVector
    """This rank's selection, with its exact values."""
    remainder: SparseVector | None = None
    """Rounding errors of the sent values, for this rank's residual; None if values were sent exactly."""
    repartitioned: bool = False
    balanced: bool = False

    @property
    def contributed(self) -> Indices | slice:
        """Indices of this rank's acc that contributed to the update; EVERYTHING if all did."""
        return self.selected.indices if self.reached is None else self.reached


class Algorithm(ABC):
    """A sparse allreduce of one flat vector. It remembers nothing: `exchange` returns what the next step needs."""

    value_dtype: Format | None = None
    """The format of the values that are sent; None: their own dtype."""
    selects_jointly = True
    """True if a host's ranks select the host's k elements together; False: each selects its part of k by itself."""
    keeps_k = False
    """True if at most k elements of the sum are kept; False: all."""

    def select(self, acc: Accumulator, k: int, memory: Memory) -> Selection:  # noqa: ARG002
        """Return what this rank sends of acc: its k largest elements."""
        threshold, found = local_top_k(acc, k)
        return Selection.of(found, threshold)

    @abstractmethod
    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:
        """Exchange the selections with the other workers. Collective."""

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        """Return the numbers that others need before the exchange: int64, shape (m,); here the selection's length."""
        return np.array([len(mine.elements)], np.int64)

    def digest(self, memory: Memory) -> int:
        """Return what the roll call compares of the memory: a digest, or 0; see `Memory.digest`."""
        return memory.digest()

    def global_k(self, k: int, n: int, size: int) -> int:
        """Return k', the most elements of the sum that are kept, if each of `size` workers selects k of n."""
        return min(n, k if self.keeps_k else k * size)

    def workers(self, transport: Transport) -> int:
        """Return P, the number of workers."""
        return transport.size
