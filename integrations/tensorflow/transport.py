"""horovod.tensorflow's collectives, from NumPy to NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from numpy.typing import NDArray

from horovod_oktopk.tensorflow.private import eagerly
from horovod_oktopk.transport.collectives import Collectives
from horovod_oktopk.transport.horovod import HorovodRanks
from horovod_oktopk.transport.mpi import ending


def ranks_of(process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> HorovodRanks:
    """Return the ranks of a process set; see HorovodRanks and Ranks."""
    return HorovodRanks(hvd, process_set, TensorFlowCollectives, own_channel, yield_cpu)


class TensorFlowCollectives(Collectives):
    """Calls of a channel are blocking and follow one another, so one name serves for each kind; see Collectives."""

    concurrent = False  # run eagerly, all operations of a kind have one name in TensorFlow, whatever they are given

    def __init__(self, process_set: Any, channel: int | str) -> None:
        self.rank = int(process_set.rank())
        self.size = int(process_set.size())
        self._set = process_set
        self._name = f"horovod_oktopk.{channel}"

    def allgather(self, values: NDArray[Any]) -> NDArray[Any]:
        with _eagerly_on_the_host():
            return np.asarray(hvd.allgather(tf.constant(values), name=f"{self._name}.allgather",
                                            process_set=self._set))

    def allreduce(self, values: NDArray[Any]) -> NDArray[Any]:
        with _eagerly_on_the_host():
            return np.asarray(hvd.allreduce(tf.constant(values), name=f"{self._name}.allreduce", op=hvd.Sum,
                                            process_set=self._set))

    def alltoall(self, values: NDArray[Any], splits: NDArray[Any]) -> NDArray[Any]:
        with _eagerly_on_the_host():
            received, _ = hvd.alltoall(tf.constant(values), splits=tf.constant(splits),
                                       name=f"{self._name}.alltoall", process_set=self._set)
            return np.asarray(received)


@contextmanager
def _eagerly_on_the_host() -> Iterator[None]:
    """Also where the program builds graphs. Failures become the error that elastic training recovers from.

    They say that a rank has left the job, where it has.
    """
    try:
        with eagerly(), tf.device("/cpu:0"):
            yield
    except (tf.errors.OpError, HorovodInternalError) as error:
        raise HorovodInternalError(ending.explain(error)) from error
