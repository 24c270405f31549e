"""SameBlocks: all ranks send the same blocks, so that no index travels, and a rank's bytes do not grow with P."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ..phases.balance import balance_and_allgatherv
from ..phases.link import Link
from ..phases.regions import Regions
from ..phases.split import split_and_reduce
from ..selection.accumulator import Accumulator
from ..selection.selection import Selection
from ..transport.base import Counts
from ..vectors.runs import Runs
from ..vectors.sparse import RunVector, SparseVector
from ..vectors.wire import BLOCK, Format, blocks_of
from .algorithm import Algorithm, Call, Memory, Result
from .options import FEW_WORKERS, OVERSHOOT, Scheme, Unit
from .turns import Turns

logger = logging.getLogger("horovod_oktopk")

ANEW = ("the ranks' blocks do not have the same turns, as a rank has joined, or resumed without them: step %d sends "
        "nothing, and then all blocks come once, in order. Nothing is lost; load the same checkpoint on all ranks if "
        "this comes at each start")


class SameBlocksAllreduce(Algorithm):
    """u = Σ acc, in the blocks whose turn it is. A rank sends about 2k(P-1)/P values, and no index.

    The elements of these blocks, one after the other, are a vector of their own, of which ranks send and reduce all.
    """

    selects_jointly, keeps_k = False, True

    def __init__(self, value_dtype: Format | None = None) -> None:
        self.value_dtype = value_dtype

    def select(self, acc: Accumulator, k: int, memory: Memory) -> Selection:
        """Return the blocks whose turn it is: up to k elements, and at least one block."""
        count = blocks_of(acc.n) if k >= acc.n else max(1, k // BLOCK)
        blocks = _turns(memory, acc.n).next_blocks(count)
        places = Runs.of_blocks(blocks, BLOCK, acc.n)
        return _all_of(RunVector(places, acc.elements_at(places)))

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        return np.array([_turns(memory, n).digest()], np.int64)

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:
        """Reduce the blocks. Collective.

        Nothing is sent if the ranks have different turns, as some have joined or resumed: all begin anew.
        """
        if (call.counts != call.counts[0]).any():
            logger.warning(ANEW, call.t)
            nothing = SparseVector.empty(mine.elements.values.dtype)
            return Result(nothing, None, Memory(call.t), nothing)
        blocks = mine.elements
        assert isinstance(blocks, RunVector)
        regions = _regions_of_blocks(len(blocks), link)
        sums = split_and_reduce(RunVector.between(0, mine.sent.values), regions, link)
        link, kept = link.fitted_to(_all_of(sums))
        total = balance_and_allgatherv(kept.sent, np.diff(regions.boundaries), False, regions, link)
        moved = (np.maximum.reduceat(np.abs(total.values), np.arange(0, len(blocks), BLOCK)) if len(blocks)
                 else total.values)
        turns = _turns(memory, call.n).after(blocks.runs.starts // BLOCK, moved)
        return Result(blocks.with_values(total.values), None, Memory(call.t, turns=turns), blocks,
                      _remainder(mine, kept))


@dataclass(frozen=True, eq=False)
class SameBlocks(Scheme):
    """SameBlocks: all ranks send the same blocks of 64 elements in turn, those first that have moved most of late.

    A rank sends about 2k(P−1)/P values, in `StepAhead` of 4.25 bits, and no index. Its bytes do not grow with the
    number of ranks. The density is the fraction of the elements that a step sends: on average a block waits for
    1/density steps. `"auto"`: the largest, from 0.1 on, whose steps take at most 5 % longer than those of the
    smallest. The options transport and hierarchical are explained in `OkTopk`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=StepAhead(SameBlocks(density=0.2)))
    """

    density: float | Literal["auto"] = 0.2
    densities: ClassVar[tuple[float, ...]] = (*(0.1 * 2 ** (number / 2) for number in range(7)), 1.0)

    def settings(self, unit: Unit = "gradients") -> Mapping[str, Any]:
        """Return all options by name, with the format of the values that are sent."""
        return {**super().settings(unit), "value_dtype": _format(unit)}

    def coefficient(self, workers: int, normalizes: bool, overlap: bool) -> float:  # noqa: ARG002
        """Return 1, with which the ranks' mean p moves as in dense training; with overlap √(8/P) for many workers.

        A rank's own noise grows with √P, in units of a step of all ranks. With overlap and
        λ = 1 AdamW on 16 nearly fails.
        """
        return min(1.0, math.sqrt(FEW_WORKERS / workers)) if overlap else 1.0

    def overshoot_of_p(self, workers: int) -> float:  # noqa: ARG002
        return OVERSHOOT

    def algorithm(self, unit: Unit = "gradients") -> SameBlocksAllreduce:
        """Return the algorithm with these options."""
        return SameBlocksAllreduce(_format(unit))


def _format(unit: Unit) -> Format | None:
    return "log4 blocks" if unit == "parameters" else None


def _turns(memory: Memory, n: int) -> Turns:
    """Return the remembered turns, if they are of so many elements; otherwise new ones."""
    turns, count = memory.turns, blocks_of(n)
    return turns if turns is not None and len(turns.rates) == count else Turns.new(count)


def _all_of(vector: SparseVector) -> Selection:
    """Return a selection of all elements. As blocks have scales of their own, no pass looks for the largest."""
    return Selection.of(vector, 0.0, ends=(0.0, 0.0))


def _remainder(mine: Selection, kept: Selection) -> SparseVector | None:
    """Return this rank's rounding errors, of what it sent and of the sums that it keeps; None if there are none."""
    if kept.sent is kept.elements:
        return None
    lost = mine.lost()
    with np.errstate(invalid="ignore"):  # a sum that has overflowed is not committed
        kept.lost().add_to(lost.values)
    return lost


def _regions_of_blocks(length: int, link: Link) -> Regions:
    """Return one region for each rank, cut at blocks' borders. Every rank sends all elements of every region."""
    rank, size = link.transport.rank, link.transport.size
    boundaries = np.minimum(BLOCK * (blocks_of(length) * np.arange(size + 1) // size), length)
    sizes = np.diff(boundaries)
    return Regions(boundaries, sizes, np.full(size, sizes[rank]))
