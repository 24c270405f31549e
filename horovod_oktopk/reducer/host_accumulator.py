"""A rank's share of its host's residual + gradients, where each host is one worker.

The ranks of a host add up their gradients share by share: each sends every other one its part of that one's share,
and gets theirs of its own. So a rank keeps 1/L of what it would keep alone, and selects from as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..selection.accumulator import NumpyAccumulator
from ..transport.base import Transport
from ..transport.counting import Hosts
from ..vectors.sparse import Indices, SparseVector, Values

CHUNK = 1 << 20
"""Elements of a gradient that are added up at a time."""


class HostAccumulator(NumpyAccumulator):
    """A ResidualAccumulator of a share of n elements, to which gradients of the `whole` vector are handed.

    What `read_residual` gives is of the whole, with zeros outside of the share. `load_residual` takes any: what lies
    outside is added to this rank's next gradient, and so comes to where it belongs.
    """

    def __init__(self, whole: int, dtype: Any, hosts: Hosts) -> None:
        self.whole = whole
        self._within, self._bounds = hosts.within, hosts.bounds(whole).tolist()
        self._share = slice(*self._bounds[hosts.within.rank:hosts.within.rank + 2])
        super().__init__(self._share.stop - self._share.start, dtype)
        self._outside: Values | None = None  # until it is committed; afterwards, while that can be reverted:
        self._spent: Values | None = None

    def accumulate(self, pieces: Iterable[tuple[int, NDArray[Any]]], scale: float = 1.0, clear: bool = False) -> bool:
        self._spent, total = None, np.zeros(self.n, self.dtype)
        with self._within.phase("host_sum"):
            for offset, piece in pieces:
                for start in range(0, len(piece), CHUNK):
                    part = piece[start:start + CHUNK]
                    self._add_up(offset + start, self._with_outside(part, offset + start, scale), total)
                    if clear:
                        part.fill(0)
        return super().accumulate([(0, total)], scale)

    def _with_outside(self, part: NDArray[Any], offset: int, scale: float) -> Values:
        own: Values = np.ascontiguousarray(part, self.dtype)
        if self._outside is not None:
            own = own + self._outside[offset:offset + len(part)] * self.dtype.type(scale)
        return own

    def _add_up(self, offset: int, part: Values, total: Values) -> None:
        """Adds to `total` what all of the host's ranks have of this rank's share, in their order."""
        pieces = [part[max(start - offset, 0):max(stop - offset, 0)] for start, stop in pairwise(self._bounds)]
        first = max(offset - self._share.start, 0)
        for piece in exchanged(pieces, self._within):
            total[first:first + len(piece)] += piece

    def commit(self, contributed: Indices | slice, remainder: SparseVector | None = None) -> None:
        super().commit(contributed, remainder)
        self._spent, self._outside = self._outside, None

    def revert(self) -> bool:
        self._outside, self._spent = self._spent, None
        return super().revert()

    def read_residual(self) -> Values:
        residual = np.zeros(self.whole, self.dtype) if self._outside is None else self._outside.copy()
        residual[self._share] = self.residual
        return residual

    def load_residual(self, values: Values) -> None:
        outside: Values = np.array(values, self.dtype)
        super().load_residual(outside[self._share])
        outside[self._share] = 0
        self._outside = outside if outside.any() else None


def exchanged(pieces: Sequence[Values], within: Transport) -> Iterator[Values]:
    """All ranks' pieces of this rank's share, by rank. pieces: what goes to each; this rank's own among them."""
    mine, others = pieces[within.rank], [rank for rank in range(within.size) if rank != within.rank]
    outgoing = {rank: pieces[rank].view(np.uint8) for rank in others if len(pieces[rank])}
    incoming = {rank: mine.nbytes for rank in others if len(mine)}
    came = {rank: message.view(mine.dtype) for batch in within.exchange(outgoing, incoming, within.size)
            for rank, message in batch}
    for rank in range(within.size):
        yield mine if rank == within.rank else came.get(rank, mine)
