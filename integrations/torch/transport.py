"""The ranks of horovod.torch, and its collectives."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from horovod_oktopk.transport.collectives import HorovodTransport
from horovod_oktopk.transport.horovod import HorovodRanks


class TorchTransport(HorovodTransport):
    """See HorovodTransport."""

    hvd, concurrent = hvd, True
    to_tensor = staticmethod(torch.from_numpy)
    failures = (HorovodInternalError,)


def ranks_of(process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> HorovodRanks:
    """Return the ranks of a process set; see HorovodRanks and Ranks."""
    return HorovodRanks(process_set, TorchTransport, own_channel, yield_cpu)
