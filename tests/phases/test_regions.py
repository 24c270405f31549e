"""Regions: balanced whatever the ranks' distributions, and owned by whoever holds most already."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.phases.regions import (
    SAMPLES_PER_RANK,
    consensus,
    local_quantiles,
    owner_rotation,
    space_repartition,
)
from horovod_oktopk.transport.local import run_ranks


def cut(selected, n):
    size = len(selected)
    rows = np.stack([local_quantiles(indices, SAMPLES_PER_RANK * size) for indices in selected])
    return consensus(rows, n, size)


def region_counts(selected, boundaries):
    """Shape (P, P): elements of rank i in region j."""
    return np.stack([np.histogram(indices, boundaries)[0] if len(indices) else np.zeros(len(boundaries) - 1, int)
                     for indices in selected])


def region_loads(selected, boundaries):
    """Elements by region; a region is half-open, the last one too."""
    return np.array([sum(int(((indices >= start) & (indices < stop)).sum()) for indices in selected)
                     for start, stop in pairwise(boundaries)])


@st.composite
def selections(draw):
    """Sorted distinct indices of each rank, clustered anywhere, of any number."""
    n, size = draw(st.integers(1, 3000)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    selected = []
    for _ in range(size):
        width = int(rng.integers(1, n + 1))
        start = int(rng.integers(0, n - width + 1))
        count = int(rng.integers(0, min(width, 300) + 1))
        selected.append(np.sort(start + rng.choice(width, count, replace=False)))
    return n, selected


def heaviest(selected):
    """1/16 above the mean, one step of the widest-spaced quantiles, and an index that all ranks may hold."""
    size = len(selected)
    step = max(len(indices) for indices in selected) / (SAMPLES_PER_RANK * size)
    return sum(map(len, selected)) / size * (1 + 1 / SAMPLES_PER_RANK) + step + size


@given(selections())
def test_no_region_is_a_sixteenth_heavier_than_the_mean(drawn):
    n, selected = drawn
    boundaries = cut(selected, n)
    assert boundaries[0] == 0
    assert boundaries[-1] == n
    assert (np.diff(boundaries) >= 0).all()
    loads = region_loads(selected, boundaries)
    assert loads.sum() == sum(map(len, selected))
    assert loads.max() <= heaviest(selected)


def clustered(size=8, k=400, n=80_000):
    """Rank i's top-k all in the i-th part."""
    rng = np.random.default_rng(0)
    return n, [rank * n // size + np.sort(rng.choice(n // size, k, replace=False)) for rank in range(size)]


def test_ranks_with_their_top_k_in_different_places_get_balanced_regions():
    n, selected = clustered()
    assert region_loads(selected, cut(selected, n)).max() <= 1.1 * 400


def test_averaged_cuts_as_in_the_paper_would_give_one_region_nearly_all():
    """The reason for the deviation."""
    n, selected = clustered()
    cuts = [[int(indices[len(indices) * j // 8]) for j in range(1, 8)] for indices in selected]
    averaged = np.array([0, *np.mean(cuts, axis=0).astype(int), n])
    assert region_loads(selected, averaged).max() > 3 * 400


def test_all_ranks_compute_the_same_boundaries():
    n, selected = clustered(size=4)
    found = run_ranks(4, lambda transport: space_repartition(selected[transport.rank], n, transport).tolist())
    assert found == [cut(selected, n).tolist()] * 4


@pytest.mark.parametrize(("n", "size"), [(10, 3), (2, 5), (1, 1)])
def test_without_any_selection_regions_are_of_equal_width(n, size):
    boundaries = cut([np.empty(0, np.int64)] * size, n)
    assert boundaries.tolist() == [n * j // size for j in range(size + 1)]


def test_quantiles_are_at_equal_steps():
    assert local_quantiles(np.arange(0, 80, 10), 4).tolist() == [8, 0, 20, 40, 60]
    assert local_quantiles(np.array([3, 9]), 4).tolist() == [2, 3, 3, 9, 9]
    assert local_quantiles(np.empty(0, np.int64), 3).tolist() == [0, 0, 0, 0]


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_the_rotation_keeps_at_least_one_in_p_at_home(size, seed):
    counts = np.random.default_rng(seed).integers(0, 20, (size, size))
    rotation = owner_rotation(counts)
    kept = [sum(int(counts[(j + r) % size, j]) for j in range(size)) for r in range(size)]
    assert 0 <= rotation < size
    assert kept[rotation] == max(kept)
    assert kept[rotation] * size >= counts.sum()
    assert rotation == kept.index(max(kept))


def test_ranks_whose_clusters_are_rotated_own_them():
    n, selected = clustered(size=4)
    rotated = [selected[(rank + 1) % 4] for rank in range(4)]
    counts = region_counts(rotated, cut(rotated, n))
    rotation = owner_rotation(counts)
    assert rotation == 3
    assert sum(counts[(j + rotation) % 4, j] for j in range(4)) >= 0.9 * counts.sum()
