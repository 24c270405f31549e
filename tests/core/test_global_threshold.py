"""The exact global k-th magnitude, by radix search over values that lie scattered over the ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_oktopk.core.global_threshold import GlobalThreshold, th_re_evaluate
from horovod_oktopk.core.sparse import SparseVector
from horovod_oktopk.transport.local import run_ranks

TINY = {"float32": 1e-45, "float64": 5e-324}


def scattered(dtype, size, rng):
    """Non-zero values of every rank: denormals, ties and all signs."""
    exponents = rng.integers(-44, 38, 40 * size)
    values = (rng.integers(1, 4, 40 * size) * 10.0 ** exponents * rng.choice([-1, 1], 40 * size)).astype(dtype)
    values[::9] = TINY[dtype]
    values[values == 0] = -TINY[dtype]
    return np.split(values, np.sort(rng.integers(0, len(values), size - 1)))


def kth_of_all(parts, k):
    magnitudes = np.sort(np.abs(np.concatenate(parts)))
    threshold = magnitudes[-k]
    return float(threshold), k - int((magnitudes > threshold).sum())


@given(st.sampled_from(["float32", "float64"]), st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_the_kth_magnitude_and_the_ties_of_the_top_k_are_exact(dtype, size, k, seed):
    parts = scattered(dtype, size, np.random.default_rng(seed))
    found = run_ranks(size, lambda transport: th_re_evaluate(parts[transport.rank], k, transport), timeout=10)
    assert found == [kth_of_all(parts, k)] * size


@pytest.mark.parametrize("values", [[1.0, -np.inf, 3.0], [-5e-324, 5e-324, 1e-320]])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_extreme_values_are_found(values, k):
    parts = [np.array(values), np.empty(0)]
    found = run_ranks(2, lambda transport: th_re_evaluate(parts[transport.rank], k, transport), timeout=10)
    assert found == [kth_of_all(parts, k)] * 2


def test_fewer_than_k_values_give_threshold_zero():
    parts = [np.ones(3, np.float32), np.empty(0, np.float32)]
    found = run_ranks(2, lambda transport: th_re_evaluate(parts[transport.rank], 4, transport), timeout=10)
    assert found == [(0.0, 0)] * 2


def select(parts, k, region_order, value=None, due=True, guard=0.25, fits=lambda sizes: True):
    """(indices selected, sizes, threshold) on every rank."""
    def program(transport):
        threshold = GlobalThreshold(guard)
        threshold.value = value
        chosen, sizes = threshold.select(parts[transport.rank], k, due, np.array(region_order), fits, transport)
        return chosen.indices.tolist(), sizes.tolist(), threshold.value

    return run_ranks(len(parts), program, timeout=10)


def regions(values, region_order):
    """Equal parts of a dense vector, part j with rank region_order[j]."""
    parts = [None] * len(region_order)
    for block, rank in zip(np.split(np.arange(len(values)), len(region_order)), region_order, strict=True):
        parts[rank] = SparseVector(block, np.asarray(values, np.float32)[block])
    return parts


@pytest.mark.parametrize("region_order", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
@pytest.mark.parametrize("k", range(1, 7))
def test_ties_go_to_the_lower_index_whoever_owns_it(region_order, k):
    found = select(regions([1, 2, 1, 1, -1, 1], region_order), k, region_order)
    expected = sorted([1, 0, 2, 3, 4, 5][:k])
    assert sorted(index for indices, _, _ in found for index in indices) == expected
    assert all(sizes == [len(indices) for indices, _, _ in found] for _, sizes, _ in found)


def test_zero_sums_are_never_selected():
    found = select(regions([0, 1, 0, 0], [0, 1]), 4, [0, 1])
    assert [indices for indices, _, _ in found] == [[1], []]


TEN = regions(np.arange(1, 21), [0, 1])


@pytest.mark.parametrize(("value", "count"), [(11.0, 10), (13.0, 10), (9.0, 10), (8.0, 10), (4.5, 12), (26.0, 8)])
def test_a_threshold_is_reused_by_moving_it_to_where_it_selects_nearest_to_k(value, count):
    """By a sixteenth of an octave at a time, and an octave at most."""
    for rank, (indices, sizes, threshold) in enumerate(select(TEN, 10, [0, 1], value, due=False)):
        assert sum(sizes) == count == sum(x >= threshold for x in range(1, 21))
        assert len(indices) == sizes[rank]
        steps = 16 * np.log2(threshold / value)
        assert abs(steps - round(steps)) < 1e-3
        assert abs(round(steps)) <= 16


@pytest.mark.parametrize("value", [28.0, 4.0, 0.0, 99.0])
def test_a_threshold_that_deviates_too_far_is_re_evaluated_by_all(value):
    for _, sizes, threshold in select(TEN, 10, [0, 1], value, due=False):
        assert (sizes, threshold) == ([0, 10], 11.0)


def test_a_due_threshold_is_re_evaluated_though_it_would_fit():
    assert select(TEN, 10, [0, 1], 13.0)[0][1:] == ([0, 10], 11.0)
    assert select(TEN, 10, [0, 1], 13.0, due=False)[0][2] != 11.0


def test_sizes_that_send_too_much_are_not_taken():
    """The next best is, and where there is none, all re-evaluate."""
    for _, sizes, _ in select(TEN, 10, [0, 1], 11.0, due=False, fits=lambda sizes: sizes.sum() != 10):
        assert sizes == [1, 10]
    for _, sizes, threshold in select(TEN, 10, [0, 1], 12.0, due=False, fits=lambda sizes: False):
        assert (sizes, threshold) == ([0, 10], 11.0)
