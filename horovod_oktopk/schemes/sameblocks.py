"""SameBlocks: all ranks send the same blocks, so that no index travels, and a rank's bytes do not grow with P."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import OptionError
from ..phases.balance import balance_and_allgatherv
from ..phases.link import Link
from ..phases.regions import Regions
from ..phases.split import split_and_reduce
from ..selection.accumulator import Accumulator
from ..selection.selection import Selection
from ..transport.base import Counts
from ..vectors.sparse import Indices, SparseVector
from ..vectors.wire import BLOCK, Format
from .algorithm import Algorithm, Call, Memory, Result
from .options import Scheme, Unit
from .turns import Turns


class SameBlocksAllreduce(Algorithm):
    """u = Σ acc, in the blocks whose turn it is. A rank sends 2k(P-1)/P values, and no index.

    The elements of these blocks, one after the other, are a vector of their own, of which ranks send and reduce all.
    """

    selects_jointly = False

    def __init__(self, value_dtype: Format | None = None) -> None:
        self.value_dtype = value_dtype

    def select(self, acc: Accumulator, k: int, memory: Memory) -> Selection:
        """Return the blocks whose turn it is: up to k elements, and at least one block."""
        blocks = _turns(memory, acc.n).first(max(1, (k if k < acc.n else k + BLOCK) // BLOCK))
        places = (BLOCK * blocks[:, None] + np.arange(BLOCK)).ravel()
        places = places[:np.searchsorted(places, acc.n)]  # the last block may be shorter
        return Selection.of(SparseVector(places, acc.at(places)), 0.0)

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        """Return a number that almost certainly differs if the blocks do."""
        return np.array([zlib.crc32(_blocks(mine).tobytes())], np.int64)

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:
        """Reduce the blocks. Collective.

        Nothing is sent if the ranks have different turns, as some have joined or resumed: all begin anew.
        """
        if (call.counts != call.counts[0]).any():
            nothing = SparseVector.empty(mine.dtype)
            return Result(nothing, nothing.indices, Memory(call.t), nothing)
        places, order = mine.elements.indices, np.arange(len(mine))
        regions = _equal_regions(len(order), link)
        sums = split_and_reduce(SparseVector(order, mine.sent.values), regions, link)
        kept = Selection.of(sums, 0.0).rounded(link.codec)
        total = balance_and_allgatherv(kept.sent, np.diff(regions.boundaries), False, regions, link)
        moved = np.maximum.reduceat(np.abs(total.values), order[::BLOCK]) if len(order) else total.values
        return Result(SparseVector(places, total.values), places,
                      Memory(call.t, turns=_turns(memory, call.n).after(_blocks(mine), moved)), mine.elements,
                      _remainder(mine, kept))

    def global_k(self, k: int, n: int, size: int) -> int:  # noqa: ARG002
        return min(n, k)


@dataclass(frozen=True, eq=False)
class SameBlocks(Scheme):
    """SameBlocks: all ranks send the same blocks of 64 elements in turn, those first that have moved most of late.

    A rank sends 2k(P−1)/P values, in `StepAhead` of 4.25 bits, and no index. Its bytes do not grow with the number of
    ranks, and selecting reads only what is sent. The density is that of a step; well below 0.1 blocks wait too long.
    The options transport and hierarchical are explained in `OkTopk`.

    Raises:
        OptionError: A value is not allowed; also `density="auto"`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=StepAhead(SameBlocks(density=0.2)))
    """

    density: float = 0.2
    ahead: ClassVar[float | None] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measures:
            raise OptionError("SameBlocks needs a number as density, as it loses too much at low ones; got 'auto'")

    def settings(self, unit: Unit = "gradients") -> Mapping[str, Any]:
        """Return all options by name, with the format of the values that are sent."""
        return {**super().settings(unit), "value_dtype": _format(unit)}

    def algorithm(self, unit: Unit = "gradients") -> SameBlocksAllreduce:
        """Return the algorithm with these options."""
        return SameBlocksAllreduce(_format(unit))


def _format(unit: Unit) -> Format | None:
    return "log4 blocks" if unit == "parameters" else None


def _turns(memory: Memory, n: int) -> Turns:
    """Return the remembered turns; new ones if there are none, or those of another vector."""
    new = Turns.of(n)
    return memory.turns if memory.turns is not None and memory.turns.rates.shape == new.rates.shape else new


def _blocks(selection: Selection) -> Indices:
    blocks: Indices = selection.elements.indices[::BLOCK] // BLOCK
    return blocks


def _remainder(mine: Selection, kept: Selection) -> SparseVector | None:
    """Return this rank's rounding errors, of what it sent and of the sums that it keeps; None if there are none."""
    if kept.sent is kept.elements:
        return None
    lost = mine.lost()
    with np.errstate(invalid="ignore"):  # a sum that has overflowed is not committed
        lost.values[kept.elements.indices] += kept.lost().values
    return lost


def _equal_regions(length: int, link: Link) -> Regions:
    """Return one region for each rank, of whole blocks, all of whose elements every rank sends."""
    count = -(-length // BLOCK)
    boundaries = np.minimum(BLOCK * (count * np.arange(link.size + 1) // link.size), length)
    sizes = np.diff(boundaries)
    return Regions(boundaries, sizes, np.full(link.size, sizes[link.rank]))
