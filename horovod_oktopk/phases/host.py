"""Each host is one worker: its ranks hold a share of its elements each, and select and update together.

Messages between them stay on the host. All schemes go by these two functions, before and after what they exchange
with the ranks that have the same share on other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ..selection.global_top_k import ExactThreshold
from ..transport.base import Counts, Transport
from ..vectors.sparse import DenseVector, SparseVector, concatenate

V = TypeVar("V", SparseVector, DenseVector, SparseVector | DenseVector)


def select_on_host(selected: SparseVector, k: int, within: Transport) -> tuple[float, float, SparseVector]:
    """The host's threshold, its largest magnitude, and which of this rank's elements are in the host's exact top-k.

    selected: of this rank's share, the k largest (all, if there are fewer) or more. Ties go to the lower index.
    """
    exact = ExactThreshold()
    chosen, _ = exact.select(selected, k, np.arange(within.size), within)
    assert exact.value is not None
    return exact.value, exact.ends[1], chosen


def whole_update(update: V, bounds: Counts, within: Transport) -> V:
    """The update of all shares. bounds: of the shares; a rank's update has indices within its own."""
    values = _joined(update.values, within)
    if isinstance(update, DenseVector):
        return DenseVector(np.concatenate(values))
    indices = [own + start for own, start in zip(_joined(update.indices, within), bounds[:-1], strict=True)]
    parts = [SparseVector(*part) for part in zip(indices, values, strict=True)]
    return concatenate(parts, update.values.dtype)


def _joined(own: Counts, within: Transport) -> Sequence[Counts]:
    """Everyone's array, by rank."""
    sizes = within.allgather(np.array([own.nbytes]))[:, 0]
    return [part.copy().view(own.dtype) for part in within.allgatherv(own.view(np.uint8), sizes)]
