"""Local top-k by threshold (Section 3.1.3), exact at every step.

The paper re-evaluates a threshold every τ′ steps and reuses it in between, as an evaluation is dear. Here the
threshold of one step only tells the next which elements to collect while it accumulates: about 1.6 k, among which
the exact top-k costs O(k).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..kernels import KERNELS
from ..vectors.sparse import SparseVector, Values
from .accumulator import Accumulator

SAMPLE_HITS = 512
"""Number of sampled elements that should be among the top k: bounds the sampling error at about 5 %."""
MIN_SAMPLE = 8192
"""Number of elements up to which all are sampled."""
MIN_STRIDE = 16
"""Smallest stride of a sample of many elements: 1/16 of n gives a rougher bound, and as exact a result.

At low densities the sample would grow to n otherwise.
"""
SPARE = 1.6
"""Number of elements that should pass the next step's bound, as a multiple of k."""
SKIP = 8
"""Stride of the candidates that give the next step's bound."""
BUFFER_FACTOR = 3
"""Room for elements that pass the bound, as a multiple of k, and at most n/4.

If the room is too small, a pass of its own selects.
"""


def local_top_k(acc: Accumulator, k: int) -> tuple[float, SparseVector]:
    """Return the exact k-th largest magnitude of acc and the exact top-k, without sorting n elements.

    The step before gives a bound that at least k elements should pass; the k-th largest of those that do is exact.
    If fewer pass, a sample gives bounds, each looser than the one before. With fewer than k non-zero elements, or no
    more than k elements at all, the threshold is 0 and all that are not zero are selected.
    """
    if k >= acc.n:
        acc.expect_threshold(np.inf, limit=0)
        everything = acc.select(0.0, acc.n)
        assert everything is not None
        return 0.0, everything
    for bound, limit in _bounds_to_try(acc, k):
        candidates = acc.select(bound, limit)
        if candidates is not None and len(candidates) >= k:
            threshold = KERNELS.kth_magnitude(candidates.values, k)
            acc.expect_threshold(_next_bound(candidates.values, k), limit=min(BUFFER_FACTOR * k, acc.n // 4))
            return threshold, largest(candidates, threshold, k)
    assert candidates is not None  # the last bound is 0
    return 0.0, candidates


def _next_bound(candidates: Values, k: int) -> float:
    """Estimate a threshold that about SPARE * k elements pass, from which the next step is to collect.

    If fewer are known, magnitudes are assumed to go on falling as they do over the last third of the ranks.
    """
    sample = candidates[::SKIP] if len(candidates) > SKIP * MIN_SAMPLE else candidates
    known, wanted = len(sample), SPARE * k * len(sample) / len(candidates)
    if wanted <= known:
        return KERNELS.kth_magnitude(sample, max(1, int(wanted)))
    least, before = KERNELS.kth_magnitude(sample, known), KERNELS.kth_magnitude(sample, -(-2 * known // 3))
    return float(least * (least / before) ** (np.log(wanted / known) / np.log(1.5)))


def _bounds_to_try(acc: Accumulator, k: int) -> Iterator[tuple[float, int]]:
    """Yield thresholds, and the number of elements that may pass each."""
    if acc.expected < np.inf:
        yield acc.expected, min(BUFFER_FACTOR * k, acc.n)
    stride = 1 if acc.n <= MIN_SAMPLE else max(1, min(acc.n // MIN_SAMPLE, max(MIN_STRIDE, k // SAMPLE_HITS)))
    sample = acc.sample(stride)
    wanted = SPARE * k / stride
    position = int(wanted + 3 * np.sqrt(wanted)) + 2
    while position <= len(sample):
        yield KERNELS.kth_magnitude(sample, position), acc.n
        position *= 2
    yield 0.0, acc.n


def top_k(candidates: SparseVector, k: int) -> SparseVector:
    """Return the k elements (k from 0) of largest magnitude (all, if there are fewer), ties to the lower index."""
    if len(candidates) <= k:
        return candidates
    if k == 0:
        return candidates[:0]
    return largest(candidates, KERNELS.kth_magnitude(candidates.values, k), k)


def nonzero_top_k(total: SparseVector, k: int) -> SparseVector:
    """Return the k largest elements; sums that cancel to zero do not count."""
    return top_k(total.compress(total.values != 0), k)


def largest(candidates: SparseVector, threshold: float, k: int) -> SparseVector:
    """Return the top k, given their least magnitude."""
    passing = candidates.passing(threshold)
    surplus = len(passing) - k
    if surplus <= 0:
        return passing
    equal = np.flatnonzero(np.abs(passing.values) == threshold)
    return passing.without(equal[-surplus:])
