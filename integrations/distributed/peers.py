"""The ranks of a process group, as PyTorch's optimizers see them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from horovod_oktopk.distributed.ddp import refuse_ddp
from horovod_oktopk.distributed.groups import GroupRanks, GroupTransport
from horovod_oktopk.errors import PluginError
from horovod_oktopk.torch_base.peers import Peers
from horovod_oktopk.torch_base.tensors import overlaps, wide_dtype
from horovod_oktopk.transport.base import Bytes, Counts
from horovod_oktopk.transport.connect import introduce
from horovod_oktopk.transport.ranks import Hierarchical, TransportName

OVERLAPS = ("a tensor to be broadcast has several elements in one place of memory, as expand() makes them: make it "
            "contiguous() before")


class GroupPeers(Peers):
    """The ranks of a process group; None is the group of all ranks. Tensors travel in host memory.

    See Ranks for the other arguments.
    """

    ranks: GroupRanks
    _members: Counts | None = None  # those of this host; None: all

    def __init__(self, process_group: Any, own_channel: bool = False, yield_cpu: bool = False) -> None:
        self.ranks = GroupRanks(process_group, own_channel, yield_cpu)

    @property
    def _transport(self) -> GroupTransport:
        return self.ranks.transport("tensors", self._members)

    def reduce(self, tensors: Sequence[torch.Tensor], average: bool) -> None:
        """Replace dense tensors by their means or sums, in place: added up in float32, or in float64 if they are."""
        transport = self._transport
        for wide, some in groupby(tensors, wide_dtype):
            group = list(some)
            flat = torch.cat([tensor.detach().reshape(-1).to("cpu", wide) for tensor in group])
            total = torch.from_numpy(transport.allreduce(flat.numpy()))
            if average:
                total /= transport.size
            for tensor, part in zip(group, torch.split(total, [each.numel() for each in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def reduce_sparse(self, named: Mapping[str, torch.Tensor], average: bool) -> list[torch.Tensor]:
        return [self._reduced(tensor, average) for tensor in named.values()]

    def _reduced(self, tensor: torch.Tensor, average: bool) -> torch.Tensor:
        transport = self._transport
        tensor = tensor.coalesce()
        indices, values = tensor.indices(), tensor.values()
        all_indices = torch.cat([each.view(len(indices), -1) for each in self._gathered(indices)], dim=1)
        all_values = torch.cat([each.view(-1, *values.shape[1:]) for each in self._gathered(values)])
        total = torch.sparse_coo_tensor(all_indices.to(tensor.device), all_values.to(tensor.device), tensor.shape)
        return total / transport.size if average else total

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements of all ranks' tensors of this dtype, in the ranks' order."""
        return [torch.from_numpy(each.copy()).view(tensor.dtype) if len(each) else tensor.new_empty(0, device="cpu")
                for each in self._messages(_bytes_of(tensor))]

    def _messages(self, mine: Bytes) -> list[Bytes]:
        transport = self._transport
        return transport.allgatherv(mine, transport.allgather(np.array([len(mine)]))[:, 0])

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Replace tensors by those of the root, in place. Collective."""
        if not self.ranks.takes_part or self.ranks.membership().size == 1:
            return
        if any(map(overlaps, tensors)):
            raise PluginError(OVERLAPS)
        transport = self._transport
        for tensor in (each for each in tensors if each.numel()):
            mine = _bytes_of(tensor) if transport.rank == root else np.empty(0, np.uint8)
            found = transport.broadcast(mine, root, tensor.nbytes)
            if transport.rank != root:
                tensor.detach().copy_(torch.from_numpy(found).view(tensor.dtype).view(tensor.shape))

    def numbers(self, mine: Counts) -> Counts:
        return self._transport.allgather(mine)

    def objects(self, value: Any) -> list[Any]:
        return [pickle.loads(each.tobytes()) for each in self._messages(np.frombuffer(pickle.dumps(value), np.uint8))]

    def on_host(self, choice: TransportName, hierarchical: Hierarchical) -> GroupPeers | None:
        rank, size, _ = self.ranks.membership()
        _, grid = introduce(self.ranks, choice, hierarchical) if size > 1 else (None, None)
        if grid is None:
            return None
        host = copy.copy(self)
        (host._members,) = (members for members in grid if rank in members)
        return host

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        refuse_ddp(parameters)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's elements as bytes in host memory, of which it is no copy if it lies there."""
    found: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return found
