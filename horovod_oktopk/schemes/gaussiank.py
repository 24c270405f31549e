"""Gaussiank (Shi et al., 2019): the threshold that a normal distribution like acc's would have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from statistics import NormalDist

from ..selection.accumulator import Accumulator
from ..selection.local_top_k import BUFFER_FACTOR, top_k
from ..vectors.sparse import SparseVector
from .base import Scheme, Unit
from .topka import TopkAAllreduce

LOWERED = 0.9
"""Factor on a threshold that selects too few elements, applied until enough pass."""
ATTEMPTS = 64
"""Most thresholds to try. The last is about a thousandth of the first; then all elements are selected."""


@dataclass(frozen=True, eq=False)
class GaussianK(Scheme):
    """Gaussiank (Shi et al., 2019): TopkA with a threshold that is estimated from mean and deviation.

    The threshold is lowered until more than 3k/4 elements pass; if more than k pass, the k largest are sent. The
    options density and transport are explained in `OkTopk`.

    Raises:
        OptionError: A value is not allowed.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=GaussianK(density=0.01))
    """

    def algorithm(self, unit: Unit = "gradients") -> GaussianKAllreduce:  # noqa: ARG002
        """Return the algorithm with these options."""
        return GaussianKAllreduce()


class GaussianKAllreduce(TopkAAllreduce):
    """TopkA with an estimated threshold, lowered until more than 3k/4 elements pass (Ok-Topk, Section 5.4).

    If more than k pass, the k largest are sent: the volume keeps to TopkA's bound.
    """

    def local_selection(self, acc: Accumulator, k: int) -> tuple[float, SparseVector]:
        for threshold in lowered(gaussian_threshold(*acc.moments(), k / acc.n)):
            selection = acc.select(threshold, limit=acc.n)
            assert selection is not None
            if len(selection) > 3 * k / 4:
                break
        else:
            threshold = 0.0
            selection = acc.select(0.0, limit=acc.n)
            assert selection is not None
        acc.expect(LOWERED * threshold, limit=min(BUFFER_FACTOR * k, acc.n // 4))
        return threshold, top_k(selection, k).copy()


def lowered(threshold: float) -> Iterator[float]:
    """Yield the threshold, and those to try after it."""
    return accumulate(repeat(LOWERED, ATTEMPTS - 1), mul, initial=threshold)


def gaussian_threshold(mean: float, deviation: float, density: float) -> float:
    """Return the magnitude that this share of a normal distribution exceeds, by its upper tail's percent point."""
    share = max(min(1 - density / 2, 1 - 2.0**-53), 0.5)
    return max(0.0, abs(mean) + deviation * NormalDist().inv_cdf(share))
