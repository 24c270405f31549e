"""The ranks of a process set of Horovod, as PyTorch's optimizers see them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


def name_operations() -> None:
    """Have operations of Horovod that the program does not name be named by their order among those of a process set.

    Horovod names them by a count of all operations, in which those of an exchange beside the program come anywhere.
    """
    for name, start in list(vars(hvd.mpi_ops).items()):
        if name.startswith("_") and name.endswith("_async"):
            setattr(hvd.mpi_ops, name, _naming(start))


def _naming(start: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(start)

    @functools.wraps(start)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if call.arguments["name"] is not None:
            return start(*args, **kwargs)
        ranks = tuple(call.arguments["process_set"].ranks or ())  # an id may come again, for another set
        with _naming_one:
            call.arguments["name"] = f"{start.__name__}.unnamed.{_unnamed[ranks]}"
            handle = start(*call.args, **call.kwargs)
            _unnamed[ranks] += 1  # not before: Horovod may refuse what it is given, on one rank
        return handle

    return wrapped


_unnamed: Counter[tuple[int, ...]] = Counter()
"""Number of operations that the program has not named, by the ranks of the process set."""
_naming_one = threading.Lock()


def forget_names() -> None:
    """Begin anew with the names, as all ranks do when Horovod does."""
    _unnamed.clear()
