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


@pytest.mark.parametrize(("value", "count"), [(11.0, 10), (9.0, 12), (13.0, 8)])
def test_within_the_guard_a_threshold_is_reused(value, count):
    for rank, (indices, sizes, threshold) in enumerate(select(TEN, 10, [0, 1], value, due=False)):
        assert threshold == value
        assert sum(sizes) == count
        assert len(indices) == sizes[rank]


@pytest.mark.parametrize("value", [28.0, 4.0, 0.0, 99.0])
def test_a_threshold_that_deviates_too_far_is_replaced_from_the_sketches(value):
    for _, sizes, threshold in select(TEN, 10, [0, 1], value, due=False):
        assert (sizes, threshold) == ([0, 10], 11.0)


def test_a_due_threshold_is_re_evaluated_though_it_would_fit():
    assert select(TEN, 10, [0, 1], 13.0)[0][1:] == ([0, 10], 11.0)
    assert select(TEN, 10, [0, 1], 13.0, due=False)[0][1:] == ([0, 8], 13.0)


def test_sizes_that_send_too_much_are_not_taken():
    for _, sizes, threshold in select(TEN, 10, [0, 1], 12.0, due=False, fits=lambda sizes: False):
        assert (sizes, threshold) == ([0, 10], 11.0)


@given(st.integers(1, 6), st.integers(1, 700), st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0]))
@settings(deadline=None, max_examples=60)
def test_sketches_select_nearly_the_exact_top_k(size, k, seed, unevenness):
    """At most k, less a step of k/(16 P) at most; each rank leaves out less than a step of the exact top k."""
    values = np.random.default_rng(seed).standard_normal(1500).astype(np.float32)
    values[:300] *= unevenness
    parts = [SparseVector(block, values[block]) for block in np.array_split(np.arange(1500), size)]
    found = select(parts, k, list(range(size)), 1e-30, due=False)
    selected = [index for indices, _, _ in found for index in indices]
    step = -(-k // (16 * size))
    assert len(selected) == len(set(selected)) == sum(found[0][1])
    assert k - step <= len(selected) <= k
    exact = np.argsort(-np.abs(values), kind="stable")[:k].tolist()
    assert len(set(exact) - set(selected)) <= size * (step - 1) + k - len(selected)
    assert len({threshold for _, _, threshold in found}) == 1


def test_where_a_sketch_is_too_short_all_re_evaluate_exactly():
    """One rank of eight holds all of the top k, and its sketch tells of k/2."""
    values = np.concatenate([np.arange(1000, 2000), np.ones(7000)]).astype(np.float32)
    parts = [SparseVector(block, values[block]) for block in np.split(np.arange(8000), 8)]
    for _, sizes, threshold in select(parts, 640, list(range(8)), 1e-30, due=False):
        assert (sizes, threshold) == ([640] + [0] * 7, 1360.0)
