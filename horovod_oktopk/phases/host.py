"""Hosts as workers: a host's ranks hold a share of its elements each, and select and update together.

Messages between them stay on the host.
"""

from __future__ import annotations

import numpy as np

from ..selection.global_top_k import ExactThreshold
from ..transport.base import Bytes, Counts, Transport
from ..vectors.sparse import SparseVector, concatenate


def select_on_host(selected: SparseVector, k: int, within: Transport) -> tuple[float, float, SparseVector]:
    """Return the host's threshold, its largest magnitude, and this rank's elements of the host's exact top-k.

    Collective on the host. selected: the k largest of this rank's share (all, if there are fewer) or more. Ties go to
    the lower index.
    """
    exact = ExactThreshold()
    chosen, _ = exact.select(selected, k, np.arange(within.size), within)
    assert exact.value is not None
    return exact.value, exact.ends[1], chosen


def whole_update(update: SparseVector, bounds: Counts, within: Transport) -> SparseVector:
    """Return the update of all shares. Collective on the host.

    bounds: of the shares; a rank's update has indices within its own.
    """
    dtype = update.values.dtype
    offset = np.dtype(np.uint32)  # vectors are shorter than 2**32
    mine = np.concatenate([update.values.view(np.uint8), update.indices.astype(offset).view(np.uint8)])
    parts = []
    for start, part in zip(bounds[:-1], _joined(mine, within), strict=True):
        length = len(part) // (dtype.itemsize + offset.itemsize) * dtype.itemsize
        parts.append(SparseVector(part[length:].view(offset).astype(np.int64) + start, part[:length].view(dtype)))
    return concatenate(parts, dtype)


def _joined(message: Bytes, within: Transport) -> list[Bytes]:
    """Gather all ranks' messages, by rank."""
    sizes = within.allgather(np.array([message.nbytes]))[:, 0]
    return [part.copy() for part in within.allgatherv(message, sizes)]
