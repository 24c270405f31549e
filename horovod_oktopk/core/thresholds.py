"""Local top-k by threshold (Section 3.1.3): reuse, exact re-evaluation, and the guard between them.

The paper re-evaluates a threshold every τ′ steps and hopes in between. Here at most k elements are
ever kept, and a threshold that has come to select too few or far too many is re-evaluated at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .accumulator import Accumulator
from .sparse import SparseVector, Values

SAMPLE_HITS = 512
"""How many of the sampled elements should be among the top k: bounds the sampling error at about 5 %."""
MIN_SAMPLE = 8192
"""Below this many elements all are sampled."""
MIN_STRIDE = 16
"""At low densities the sample would grow to n; 1/16 of n gives a rougher bound, and as exact a result."""


class LocalThreshold:
    """The local threshold of one rank over the steps; `value` is None until the first evaluation."""

    def __init__(self, guard: float) -> None:
        self.guard = guard
        self.value: float | None = None

    def select(self, acc: Accumulator, k: int, due: bool) -> SparseVector:
        """The local top-k: at most k elements, the largest of acc, ties to the lower index.

        due: whether the period τ′ asks for a re-evaluation. Otherwise the threshold is reused, unless
        it selects fewer than (1 - guard) k or more than (1 + guard) k elements.
        """
        if not due and self.value is not None:
            candidates = acc.select(self.value, limit=int((1 + self.guard) * k))
            if candidates is not None and len(candidates) >= (1 - self.guard) * k:
                return top_k(candidates, k)
        self.value, selected = th_re_evaluate(acc, k)
        return selected


def th_re_evaluate(acc: Accumulator, k: int) -> tuple[float, SparseVector]:
    """The exact k-th largest magnitude of acc and the exact top-k, without sorting n elements.

    A sample gives a bound that about k elements pass; the k-th largest of those that do is exact,
    provided that they are at least k; otherwise the bound is loosened. With fewer than k non-zero
    elements the threshold is 0 and all of them are selected.
    """
    candidates = None
    for bound in _loosening_bounds(acc, k):
        candidates = acc.select(bound, limit=acc.n)
        assert candidates is not None
        if len(candidates) >= k:
            return kth_magnitude(candidates.values, k), top_k(candidates, k)
    assert candidates is not None
    return 0.0, candidates


def _loosening_bounds(acc: Accumulator, k: int) -> Iterator[float]:
    stride = 1 if acc.n <= MIN_SAMPLE else max(1, min(acc.n // MIN_SAMPLE, max(MIN_STRIDE, k // SAMPLE_HITS)))
    sample = acc.sample(stride)
    expected = k / stride
    position = int(expected + 3 * np.sqrt(expected)) + 2 if stride > 1 else k
    while position <= len(sample):
        yield kth_magnitude(sample, position)
        position *= 2
    yield 0.0


def kth_magnitude(values: Values, k: int) -> float:
    """The k-th largest magnitude (k from 1) of the values."""
    magnitudes = np.abs(values)
    return float(np.partition(magnitudes, len(magnitudes) - k)[len(magnitudes) - k])


def top_k(candidates: SparseVector, k: int) -> SparseVector:
    """The k elements (k from 0) of largest magnitude (all, where there are fewer), ties to the lower index."""
    if len(candidates) <= k:
        return candidates
    if k == 0:
        return candidates[:0]
    threshold = kth_magnitude(candidates.values, k)
    magnitudes = np.abs(candidates.values)
    keep = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)
    keep[ties[:k - int(keep.sum())]] = True
    return candidates.compress(keep)
