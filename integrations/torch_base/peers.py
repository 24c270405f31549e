"""The ranks that train one model together, as an optimizer sees the library that has started them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_oktopk.transport.base import Counts
from horovod_oktopk.transport.ranks import Hierarchical, Ranks, TransportName


class Peers(ABC):
    """The ranks: for what a mode exchanges, and for the library's own sums of tensors, on any device."""

    ranks: Ranks

    @abstractmethod
    def reduce(self, tensors: Sequence[torch.Tensor], average: bool) -> None:
        """Replace dense tensors by their means over the ranks, or by their sums, in place. Collective."""

    @abstractmethod
    def reduce_sparse(self, named: Mapping[str, torch.Tensor], average: bool) -> list[torch.Tensor]:
        """Return the means, or the sums, of sparse tensors, with the same names on all ranks. Collective."""

    @abstractmethod
    def objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the ranks' order. Collective."""

    @abstractmethod
    def numbers(self, mine: Counts) -> Counts:
        """Return int64 numbers of all ranks, by rank: shape (P, as many). Collective."""

    def together(self, value: Any, alike: Any) -> list[Any] | None:
        """Return the values of all ranks, by rank; None if they differ in what must be alike. Collective.

        It takes one short message where the values are the same.
        """
        mine = np.array([zlib.crc32(repr(each).encode()) for each in (alike, value)], np.int64)
        first, second = self.numbers(mine).T
        if (first != first[0]).any():
            return None
        return [value] * len(second) if (second == second[0]).all() else self.objects(value)

    @abstractmethod
    def on_host(self, choice: TransportName, hierarchical: Hierarchical) -> Peers | None:
        """Return the ranks of this host; None if each rank is a worker of its own. Collective.

        Raise as `connect` does, and PluginError if this host's ranks cannot be told apart.
        """

    @abstractmethod
    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise PluginError if somebody else reduces the gradients of one of these parameters."""


MakePeers = Callable[[bool, bool], Peers]
"""Makes the peers of one optimizer, from `own_channel` and `yield_cpu`; see Ranks."""
