"""A rank's share of its host's residual + gradients, if each host is one worker.

A rank keeps 1/L of what it would keep as a worker of its own, and selects from that share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...selection.accumulator import NumpyAccumulator
from ...transport.counting import Hosts
from ...vectors.sparse import Indices, SparseVector, Values
from .sum import HostSum


class HostAccumulator(NumpyAccumulator):
    """A ResidualAccumulator of a share of the `whole` vector, which takes gradients of the whole.

    hosts: called at every step, as elastic training changes the hosts; returns None if each rank is a host of its
    own, and keeps all elements. The share is taken in the first step; until then n is 0. `read_residual` returns the
    whole, with zeros outside of the share. `load_residual` takes any vector: values outside of the share are added to
    this rank's next gradient, and so come to the rank of their share.
    """

    def __init__(self, whole: int, dtype: Any, hosts: Callable[[], Hosts | None]) -> None:
        self.whole = whole
        self._hosts = hosts
        self._known: Hosts | None = None
        self._has_begun = False
        self._sum: HostSum | None = None
        self._share = slice(0, 0)
        self._outside: Values | None = None  # until it is committed
        super().__init__(0, dtype)

    def accumulate(self, pieces: Iterable[tuple[int, NDArray[Any]]], clear: bool = False) -> bool:
        hosts = self._hosts()
        if hosts is not self._known or not self._has_begun:
            self._take_share(hosts)
        if self._sum is None:
            return super().accumulate(pieces, clear)
        return self._add_sums(self._sum.of(pieces, self._outside, clear), clear)

    def _take_share(self, hosts: Hosts | None) -> None:
        """Take this rank's share of these hosts. The residual stays, and comes to the ranks of its shares."""
        residual, self._known, self._has_begun = self.read_residual(), hosts, True
        if hosts is None:
            self._sum, self._share = None, slice(0, self.whole)
        else:
            self._sum = HostSum(self.whole, self.dtype, hosts)
            self._share = slice(*self._sum.bounds[hosts.within.rank:hosts.within.rank + 2])
        super().__init__(self._share.stop - self._share.start, self.dtype)
        self.load_residual(residual)

    def commit(self, contributed: Indices | slice, remainder: SparseVector | None = None) -> None:
        super().commit(contributed, remainder)
        self._outside = None

    def read_residual(self) -> Values:
        residual = np.zeros(self.whole, self.dtype) if self._outside is None else self._outside.copy()
        residual[self._share] = self.residual
        return residual

    def load_residual(self, values: Values) -> None:
        outside: Values = np.array(values, self.dtype)
        super().load_residual(outside[self._share])
        outside[self._share] = 0
        self._outside = outside if outside.any() else None
