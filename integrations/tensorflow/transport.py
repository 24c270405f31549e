"""The ranks of horovod.tensorflow, and its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_oktopk.tensorflow.private import eagerly
from horovod_oktopk.transport.collectives import HorovodTransport
from horovod_oktopk.transport.horovod import HorovodRanks


class TensorFlowTransport(HorovodTransport):
    """See HorovodTransport. Calls run at once, also where the program builds graphs."""

    hvd = hvd
    concurrent = False  # run eagerly, all operations of a kind have one name in TensorFlow, whatever they are given
    to_tensor = staticmethod(tf.constant)
    failures = (HorovodInternalError, tf.errors.OpError)

    @staticmethod
    @contextmanager
    def around() -> Iterator[None]:
        with eagerly(), tf.device("/cpu:0"):
            yield


def ranks_of(process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> HorovodRanks:
    """Return the ranks of a process set; see HorovodRanks and Ranks."""
    return HorovodRanks(process_set, TensorFlowTransport, own_channel, yield_cpu)
