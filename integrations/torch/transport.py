"""horovod.torch's collectives, from NumPy to NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from numpy.typing import NDArray

from horovod_oktopk.transport.collectives import Collectives
from horovod_oktopk.transport.horovod import HorovodRanks
from horovod_oktopk.transport.mpi import ending


def ranks_of(process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> HorovodRanks:
    """Return the ranks of a process set; see HorovodRanks and Ranks."""
    return HorovodRanks(hvd, process_set, TorchCollectives, own_channel, yield_cpu)


class TorchCollectives(Collectives):
    """The collectives of one channel; see Collectives.

    Calls are blocking and follow one another, so one name serves for each kind.
    """

    concurrent = True

    def __init__(self, process_set: Any, channel: int | str) -> None:
        self.rank = int(process_set.rank())
        self.size = int(process_set.size())
        self._set = process_set
        self._name = f"horovod_oktopk.{channel}"

    def allgather(self, values: NDArray[Any]) -> NDArray[Any]:
        with _explained():
            return _array(hvd.allgather(torch.from_numpy(values), name=f"{self._name}.allgather",
                                        process_set=self._set))

    def allreduce(self, values: NDArray[Any]) -> NDArray[Any]:
        with _explained():
            return _array(hvd.allreduce(torch.from_numpy(values), name=f"{self._name}.allreduce", op=hvd.Sum,
                                        process_set=self._set))

    def alltoall(self, values: NDArray[Any], splits: NDArray[Any]) -> NDArray[Any]:
        with _explained():
            received, _ = hvd.alltoall(torch.from_numpy(values), splits=torch.from_numpy(splits),
                                       name=f"{self._name}.alltoall", process_set=self._set)
            return _array(received)


@contextmanager
def _explained() -> Iterator[None]:
    """Have a failure say that a rank has left the job, where it has."""
    try:
        yield
    except HorovodInternalError as error:
        raise HorovodInternalError(ending.explain(error)) from error


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.numpy()
    return array
