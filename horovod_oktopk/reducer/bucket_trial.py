"""Which buckets of gradients make a step shortest: planned by a cost model, and then measured.

A bucket costs a latency α of its own, and time by its length; it cannot begin before its last gradient is ready, nor
before the bucket ahead of it is through. So merging two buckets saves α, and makes the first wait for the second.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..timing import SAMPLES, WARM_UP, Seconds, median_seconds, seconds_of_ranks
from ..transport.base import Transport
from .buckets import Partition
from .layout import Layout

logger = logging.getLogger("horovod_oktopk")

ROUNDS = 5
"""Rounds of messages that a reduction takes at least."""


@dataclass(frozen=True)
class Sample:
    """One step, in seconds."""

    ready: Seconds
    """When each gradient of the layout was ready, counted from the first."""
    reducing: float
    """Of all buckets' reductions together, whether the backward pass hid them or not."""
    whole: float
    """From the first gradient's being ready to the end of the step."""


class BucketTrial:
    """Times one bucket, then two, plans buckets by what it has learned, and keeps the fastest; on all ranks alike.

    order: the gradients in the order in which they become ready.
    """

    def __init__(self, layout: Layout, order: Sequence[int]) -> None:
        self._order = list(order)
        self._lengths = np.diff(layout.offsets)[self._order]
        self._candidates = [self._partition([len(self._order)])]
        self._samples: list[list[Sample]] = [[]]

    @property
    def over(self) -> bool:
        """Whether the buckets are chosen."""
        return not self._samples

    def learn(self, sample: Sample, transport: Transport) -> Partition | None:
        """Takes note of a step; called on all ranks together. The buckets to go on with, where they are others."""
        if self.over:
            return None
        present = self._candidates[len(self._samples) - 1]
        self._samples[-1].append(sample)
        if len(self._samples[-1]) < WARM_UP + SAMPLES:
            return None
        following = self._next(transport)
        if following is None or following in self._candidates:
            chosen = self._fastest(transport)
            self._samples.clear()
        else:
            chosen = following
            self._candidates.append(following)
            self._samples.append([])
        return None if chosen == present else chosen

    def _next(self, transport: Transport) -> Partition | None:
        if len(self._candidates) == 1:
            before = np.cumsum(self._lengths)[:-1]
            middle = np.argmin(np.abs(before - self._lengths.sum() / 2)) + 1 if len(before) else 1
            return self._partition(sorted({int(middle), len(self._order)}))
        if len(self._candidates) > 2:
            return None
        first, second = self._samples
        # A rank's reductions hold its waiting for others; the last to come waits for nobody.
        one, two = self._medians([[s.reducing for s in first], [s.reducing for s in second]], transport).min(axis=0)
        latency = max(two - one, ROUNDS * _seconds_of_a_round(transport))
        per_element = max(one - latency, 0.0) / max(1, self._lengths.sum())
        ready = self._medians(np.array([s.ready for s in first]).T[self._order].tolist(), transport).max(axis=0)
        return self._partition(plan(ready, self._lengths, latency, per_element))

    def _fastest(self, transport: Transport) -> Partition:
        seconds = self._medians([[s.whole for s in samples] for samples in self._samples], transport).max(axis=0)
        chosen = self._candidates[int(np.argmin(seconds))]
        if transport.rank == 0:
            logger.info("bucket_bytes='auto' takes %d bucket(s) of gradients; tried: %s", len(chosen), ", ".join(
                f"{len(buckets)} ({1e3 * t:.3g} ms)" for buckets, t in zip(self._candidates, seconds, strict=True)))
        return chosen

    @staticmethod
    def _medians(samples: Sequence[Sequence[float]], transport: Transport) -> Seconds:
        """All ranks' medians of what was timed: float64, shape (P, number of samples)."""
        return seconds_of_ranks([statistics.median(each[WARM_UP:]) for each in samples], transport)

    def _partition(self, ends: Sequence[int]) -> Partition:
        """Buckets that end at these places of the order."""
        starts = [0, *ends[:-1]]
        return [tuple(sorted(self._order[start:end])) for start, end in zip(starts, ends, strict=True)]


def _seconds_of_a_round(transport: Transport) -> float:
    """The shortest time of any rank for a short message to all, equal on all ranks."""
    mine = median_seconds(lambda: transport.allgather(np.zeros(1, np.int64)), WARM_UP + SAMPLES)
    return float(seconds_of_ranks([mine], transport).min())


def plan(ready: Seconds, lengths: NDArray[np.int64], latency: float, per_element: float) -> list[int]:
    """Where buckets end, exclusive, so that the last is reduced as early as the model allows.

    ready: when each gradient is, in seconds, in the order of reduction; a bucket waits for the last of its own.
    lengths: elements of each. A bucket takes latency + per_element * its elements, after the bucket before it.
    Source: the merging of Shi et al., "MG-WFBP" (INFOCOM 2019); here exact, by dynamic programming.
    """
    ready = np.maximum.accumulate(ready)
    elements = np.concatenate([[0], np.cumsum(lengths)])
    done = np.zeros(len(ready) + 1)  # when the first so many gradients are reduced, at best
    begins = np.zeros(len(ready) + 1, np.int64)  # where the last bucket of these begins
    for end in range(1, len(done)):
        start = np.maximum(done[:end], ready[end - 1])
        finish = start + latency + per_element * (elements[end] - elements[:end])
        begins[end] = int(np.argmin(finish))
        done[end] = finish[begins[end]]
    ends = [len(ready)]
    while begins[ends[-1]]:
        ends.append(int(begins[ends[-1]]))
    return ends[::-1]
