"""The ranks that train one model together, as an optimizer sees the library that has started them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from horovod_oktopk.transport.base import Hierarchical, Ranks, TransportName


class Peers(ABC):
    """The ranks, for what a mode exchanges, and the library's own collectives, for everything else.

    All but `ranks` are collective, and block. Tensors may lie on a device.
    """

    ranks: Ranks

    @abstractmethod
    def reduce(self, tensors: Sequence[torch.Tensor], average: bool) -> None:
        """Replace dense tensors by their means over the ranks, or by their sums, in place."""

    @abstractmethod
    def reduce_sparse(self, named: Mapping[str, torch.Tensor], average: bool) -> list[torch.Tensor]:
        """Return the means, or the sums, of sparse tensors, which have the same names on all ranks."""

    @abstractmethod
    def objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the ranks' order."""

    @abstractmethod
    def on_host(self, choice: TransportName, hierarchical: Hierarchical) -> Peers | None:
        """Return the ranks of this host, or None if this rank is alone there.

        Raise as `connect` does, and PluginError if the hosts' ranks cannot be told apart.
        """


MakePeers = Callable[[bool, bool], Peers]
"""Makes the peers of one optimizer, from `own_channel` and `yield_cpu`; see Ranks."""
