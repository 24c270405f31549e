"""The ranks of a process set of Horovod, as PyTorch's optimizers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from horovod_oktopk.torch_base.peers import Peers
from horovod_oktopk.transport.base import Counts
from horovod_oktopk.transport.horovod import HorovodRanks, HorovodTransport
from horovod_oktopk.transport.ranks import Hierarchical, TransportName


class TorchTransport(HorovodTransport):
    """See HorovodTransport."""

    hvd, concurrent = hvd, True
    to_tensor = staticmethod(torch.from_numpy)
    failures = (HorovodInternalError,)


def ranks_of(process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> HorovodRanks:
    """Return the ranks of a process set; see HorovodRanks and Ranks."""
    return HorovodRanks(process_set, TorchTransport, own_channel, yield_cpu)


class HorovodPeers(Peers):
    """The ranks of a process set, and Horovod's own collectives. See Ranks for the other arguments."""

    ranks: HorovodRanks

    def __init__(self, process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> None:
        self.ranks = ranks_of(process_set, own_channel, yield_cpu)
        self._set = process_set

    def reduce(self, tensors: Sequence[torch.Tensor], average: bool) -> None:
        hvd.grouped_allreduce_(tensors, op=_op(average), name="horovod_oktopk.dense", process_set=self._set)

    def reduce_sparse(self, named: Mapping[str, torch.Tensor], average: bool) -> list[torch.Tensor]:
        handles = [hvd.sparse_allreduce_async(tensor, name=name, op=_op(average), process_set=self._set)
                   for name, tensor in named.items()]
        return [handle() for handle in handles]

    def objects(self, value: Any) -> list[Any]:
        return [hvd.broadcast_object(value, root, "horovod_oktopk.objects", self._set)
                for root in self._set.ranks or range(hvd.size())]

    def numbers(self, mine: Counts) -> Counts:
        return self.ranks.transport("numbers").allgather(mine)

    def on_host(self, choice: TransportName, hierarchical: Hierarchical) -> HorovodPeers | None:
        found = self.ranks.host_set(choice, hierarchical)
        return None if found is None else HorovodPeers(found)

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do nothing: hvd.DistributedOptimizer refuses an optimizer that it has made itself."""


def _op(average: bool) -> Any:
    return hvd.Average if average else hvd.Sum
