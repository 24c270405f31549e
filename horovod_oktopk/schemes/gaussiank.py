"""Gaussiank: TopkA with a threshold that is estimated, as if the elements were distributed normally."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from statistics import NormalDist

from ..selection.accumulator import Accumulator
from ..selection.local_top_k import BUFFER_FACTOR, top_k
from ..selection.selection import Selection
from .algorithm import Memory
from .options import Scheme
from .topka import TopkAAllreduce

LOWERED = 0.9
"""Factor on a threshold that selects too few elements, applied until enough pass."""
ATTEMPTS = 64
"""Most thresholds to try. The last is about a thousandth of the first; then all elements are selected."""


class GaussianKAllreduce(TopkAAllreduce):
    """TopkA with an estimated threshold (Ok-Topk, Section 5.4)."""

    def select(self, acc: Accumulator, k: int, memory: Memory) -> Selection:
        if k >= acc.n:
            return super().select(acc, k, memory)
        first = gaussian_threshold(*acc.moments(), k / acc.n)
        for threshold in (*accumulate(repeat(LOWERED, ATTEMPTS - 1), mul, initial=first), 0.0):
            found = acc.select(threshold, limit=acc.n)
            if found is not None and (len(found) > 3 * k / 4 or threshold == 0):
                break
        assert found is not None
        acc.expect_threshold(LOWERED * threshold, limit=min(BUFFER_FACTOR * k, acc.n // 4))
        return Selection.of(top_k(found, k).copy(), threshold)


def gaussian_threshold(mean: float, deviation: float, density: float) -> float:
    """Return the magnitude that this part of a normal distribution exceeds, by its upper tail's percent point."""
    below = max(min(1 - density / 2, 1 - 2.0**-53), 0.5)
    return max(0.0, abs(mean) + deviation * NormalDist().inv_cdf(below))


@dataclass(frozen=True, eq=False)
class GaussianK(Scheme):
    """Gaussiank (Shi et al., 2019): TopkA with a threshold that is estimated from mean and deviation.

    The threshold is lowered until more than 3k/4 elements pass; if more than k pass, the k largest are sent. The
    options density, transport and hierarchical are explained in `OkTopk`.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=GaussianK(density=0.01))
    """

    reduces = GaussianKAllreduce
