"""Gaussiank (Shi et al., 2019): the threshold that a normal distribution like acc's would have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from statistics import NormalDist

import numpy as np

from ..kernels import KERNELS
from ..phases.host import select_on_host
from ..selection.accumulator import Accumulator
from ..selection.local_top_k import BUFFER_FACTOR, top_k
from ..transport.base import Counts, Transport
from ..transport.counting import Hosts
from ..vectors.sparse import SparseVector, to_bits
from .algorithm import Step
from .base import Scheme
from .topka import TopkAAllreduce

LOWERED = 0.9
"""What a threshold that selects too few is multiplied by, until it does not."""
ATTEMPTS = 64
"""Then the threshold is about a thousandth of the first one, and all elements are selected."""


@dataclass(frozen=True, eq=False)
class GaussianK(Scheme):
    """Gaussiank (Shi et al., 2019): TopkA with a threshold that is estimated from mean and deviation.

    The threshold is lowered until more than 3k/4 elements pass; if more than k pass, the k largest are sent. The
    options density, k, transport, bucket_bytes and hierarchical are explained in `OkTopk`.

    Raises:
        OptionError: A value is not allowed.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=GaussianK(density=0.01))
    """

    def build(self, description: str) -> GaussianKAllreduce:
        """The algorithm, with these options."""
        return GaussianKAllreduce(description)


class GaussianKAllreduce(TopkAAllreduce):
    """TopkA with an estimated threshold, lowered until more than 3k/4 elements pass (Ok-Topk, Section 5.4).

    Where it lets more than k pass, the k largest are sent: the volume keeps to TopkA's bound. Where each host is one
    worker, its ranks add up moments in another order than one rank would, so the estimate may differ by rounding.
    """

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self._has_share = False
        self._moments = 0.0, 0.0  # of this rank's share, if it has one

    def select(self, step: Step) -> SparseVector:
        self._has_share, self._moments = step.transport.hosts is not None, (0.0, 0.0)
        return super().select(step)

    def local_selection(self, acc: Accumulator, k: int) -> tuple[float, SparseVector]:
        if self._has_share:  # of more than its top k the host sends nothing, whatever its threshold will be
            self._moments = acc.moments()
            return super().local_selection(acc, k)
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

    def select_on_host(self, step: Step, hosts: Hosts) -> tuple[float, float, SparseVector]:
        n = step.report.n
        k, moments = min(step.k, n), host_moments(self._moments, np.diff(hosts.bounds(n)), hosts.within)
        thresholds = list(lowered(gaussian_threshold(*moments, k / n)))
        passing = hosts.within.allgather(count_passing(step.selected, thresholds)).sum(axis=0)
        enough = np.flatnonzero(passing > 3 * k / 4)
        threshold = thresholds[enough[0]] if len(enough) else 0.0
        _, largest, selected = select_on_host(step.selected.passing(threshold), k, hosts.within)
        return threshold, largest, selected


def lowered(threshold: float) -> Iterator[float]:
    """The threshold, and those that are tried after it."""
    return accumulate(repeat(LOWERED, ATTEMPTS - 1), mul, initial=threshold)


def count_passing(selected: SparseVector, thresholds: Sequence[float]) -> Counts:
    """How many elements pass each: int64."""
    with np.errstate(over="ignore"):  # to infinity, which is right
        bits = to_bits(np.array(thresholds).astype(selected.values.dtype))
    return len(selected) - np.searchsorted(KERNELS.sorted(to_bits(selected.values)), bits)


def host_moments(mine: tuple[float, float], lengths: Counts, within: Transport) -> tuple[float, float]:
    """Mean and standard deviation of all shares. mine: of this rank's. lengths: of the shares."""
    means, deviations = within.allgather(np.array(mine).view(np.int64)).view(np.float64).T
    n = lengths.sum()
    with np.errstate(over="ignore", invalid="ignore"):  # then all elements pass, as where one rank has them
        mean = lengths @ means / n
        variance = lengths @ (deviations**2 + means**2) / n - mean**2
    return float(mean), math.sqrt(max(0.0, float(variance)))


def gaussian_threshold(mean: float, deviation: float, density: float) -> float:
    """The magnitude that this share of a normal distribution exceeds, by the percent point of its upper tail."""
    share = max(min(1 - density / 2, 1 - 2.0**-53), 0.5)
    return max(0.0, abs(mean) + deviation * NormalDist().inv_cdf(share))
