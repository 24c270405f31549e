"""Local thresholds: exact re-evaluation from a sample, reuse, and the guard between them."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk.core.accumulator import NumpyAccumulator
from horovod_oktopk.core.thresholds import LocalThreshold, th_re_evaluate, top_k

from .oracle import topk_mask

N, K = 200_000, 4000
STRIDE = min(N // 8192, K // 512)


def holding(values):
    acc = NumpyAccumulator(len(values), values.dtype)
    assert acc.accumulate([(0, values)])
    return acc


def periodic():
    """The sample meets only the large elements."""
    values = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    values[::STRIDE] += 100
    return values


def anti_periodic():
    """The sample meets none of the large elements."""
    values = np.random.default_rng(1).standard_normal(N).astype(np.float32) + 100
    values[::STRIDE] = 1e-6
    return values


def few():
    values = np.zeros(N, np.float32)
    values[np.random.default_rng(1).choice(N, K // 2, replace=False)] = -2
    return values


DATA = {
    "normal": lambda: np.random.default_rng(0).standard_normal(N).astype(np.float32),
    "float64": lambda: np.random.default_rng(0).standard_normal(N) ** 9,
    "periodic": periodic,
    "anti_periodic": anti_periodic,
    "constant": lambda: np.full(N, 3, np.float32),
    "just_k": lambda: np.where(np.arange(N) < K, -1, 0).astype(np.float32),
    "many_ties": lambda: np.random.default_rng(0).integers(-9, 9, N).astype(np.float32),
    "denormal": lambda: (np.random.default_rng(0).standard_normal(N) * 1e-41).astype(np.float32),
}


@pytest.mark.parametrize("kind", sorted(DATA))
def test_re_evaluation_is_exact_though_it_looks_at_a_sample(kind):
    assert STRIDE > 1
    values = DATA[kind]()
    threshold, selected = th_re_evaluate(holding(values), K)
    assert threshold == np.sort(np.abs(values))[-K]
    assert selected.indices.tolist() == np.flatnonzero(topk_mask(values, K)).tolist()
    assert selected.values.tobytes() == values[selected.indices].tobytes()


def test_fewer_than_k_non_zero_elements_are_all_selected():
    values = few()
    threshold, selected = th_re_evaluate(holding(values), K)
    assert threshold == 0
    assert selected.indices.tolist() == np.flatnonzero(values).tolist()


@pytest.mark.parametrize("k", [1, 9, 10, 11, 50])
def test_re_evaluation_for_every_k_around_n(k):
    values = np.arange(-3, 7, dtype=np.float32)
    _, selected = th_re_evaluate(holding(values), k)
    assert selected.indices.tolist() == np.flatnonzero(topk_mask(values, k)).tolist()


def reuse(count, k=100, guard=0.25, n=1000):
    """Selects where an earlier threshold of 5 passes `count` elements; the largest of them come last."""
    values = np.full(n, 1, np.float32) + np.arange(n, dtype=np.float32) / n
    values[n - count:] += 5
    threshold = LocalThreshold(guard)
    threshold.value = 5.0
    return threshold, threshold.select(holding(values), k, due=False)


@pytest.mark.parametrize("count", [75, 90, 100, 110, 125])
def test_reuse_within_the_guard_keeps_the_threshold(count):
    threshold, selected = reuse(count)
    assert threshold.value == 5.0
    assert selected.indices.tolist() == list(range(1000 - min(count, 100), 1000))


@pytest.mark.parametrize("count", [0, 1, 74, 126, 500, 1000])
def test_reuse_outside_the_guard_is_re_evaluated_at_once(count):
    threshold, selected = reuse(count)
    assert threshold.value != 5.0
    assert threshold.value == np.abs(selected.values).min()
    assert selected.indices.tolist() == list(range(900, 1000))


def test_a_due_threshold_is_re_evaluated_though_it_would_fit():
    threshold = LocalThreshold(0.25)
    threshold.value = 90.0
    threshold.select(holding(np.arange(100, dtype=np.float32)), 10, due=True)
    assert threshold.value == 90.0
    threshold.select(holding(np.arange(101, dtype=np.float32)), 10, due=True)
    assert threshold.value == 91.0


def test_no_guard_means_that_only_exactly_k_is_reused():
    assert reuse(100, guard=0)[0].value == 5.0
    assert reuse(99, guard=0)[0].value != 5.0


def test_top_k_gives_ties_to_the_lower_index():
    _, everything = th_re_evaluate(holding(np.array([2, -1, 1, 1, -2], np.float32)), 5)
    assert top_k(everything, 3).indices.tolist() == [0, 1, 4]
