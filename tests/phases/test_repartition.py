"""Repartition: regions are balanced whatever the ranks' distributions, and cuts that are wrong are corrected."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from horovod_oktopk.phases import regions
from horovod_oktopk.phases.regions import Distribution, local_quantiles, space_repartition
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.threads import run_ranks

from ..support.selections import clustered, selections


def cut(selected, n):
    """Return the boundaries; they are the same on all ranks."""
    found = run_ranks(len(selected), lambda transport: space_repartition(selected[transport.rank], n, transport))
    assert all(boundaries.tolist() == found[0].tolist() for boundaries in found)
    assert found[0].dtype == np.int64
    return found[0]


def rounds_of_counting(selected, n):
    """Return the number of rounds until the cuts are right."""
    def program(transport):
        counting = CountingTransport(transport)
        space_repartition(selected[transport.rank], n, counting)
        return counting.traffic.messages_sent

    (sent,) = set(run_ranks(len(selected), program))
    return (sent / (len(selected) - 1) - 1) / 2


def region_loads(selected, boundaries):
    """Return the elements by region; a region is half-open, the last one too."""
    return np.array([sum(int(((indices >= start) & (indices < stop)).sum()) for indices in selected)
                     for start, stop in pairwise(boundaries)])


@given(selections())
def test_no_region_is_a_sixteenth_heavier_than_the_mean(drawn):
    """Or by twice as many elements as there are ranks, as all of them may hold one index."""
    n, selected = drawn
    boundaries = cut(selected, n)
    assert boundaries[0] == 0
    assert boundaries[-1] == n
    assert (np.diff(boundaries) >= 0).all()
    loads, mean = region_loads(selected, boundaries), sum(map(len, selected)) / len(selected)
    assert loads.sum() == sum(map(len, selected))
    assert loads.max() <= mean + max(mean / 16, 2 * len(selected))


def uneven(size=8, k=400, n=80_000):
    """Return selections that lie most densely at the same place, each rank's with another density."""
    rng = np.random.default_rng(0)
    return n, [np.unique((n * rng.random(k) ** (1 + rank)).astype(np.int64)) for rank in range(size)]


def everywhere(size=8, k=400, n=80_000):
    rng = np.random.default_rng(0)
    return n, [np.sort(rng.choice(n, k, replace=False)) for _ in range(size)]


@pytest.mark.parametrize("draw", [clustered, everywhere])
def test_the_samples_alone_are_right_as_a_rule(draw):
    n, selected = draw()
    assert rounds_of_counting(selected, n) == 1


@pytest.mark.parametrize("draw", [clustered, uneven])
@pytest.mark.parametrize("samples", [1, 3])
def test_samples_that_mislead_are_corrected(monkeypatch, draw, samples):
    """Two or three of them say little; still the regions become as even."""
    monkeypatch.setattr(regions, "SAMPLES", samples)
    n, selected = draw()
    loads, mean = region_loads(selected, cut(selected, n)), sum(map(len, selected)) / 8
    assert loads.max() <= mean + max(mean / 16, 2 * 8)
    assert 1 < rounds_of_counting(selected, n) <= regions.TRUSTED + 1 + np.ceil(np.log2(n))


def test_an_index_that_all_ranks_hold_is_not_looked_for_twice():
    """No cut can divide it, and the samples know it."""
    selected = [np.arange(0, 900, 90)] * 9
    assert rounds_of_counting(selected, 900) == 1


@pytest.mark.parametrize(("n", "size"), [(10, 3), (2, 5), (1, 1)])
def test_without_any_selection_regions_are_of_equal_width(n, size):
    boundaries = cut([np.empty(0, np.int64)] * size, n)
    assert boundaries.tolist() == [n * j // size for j in range(size + 1)]


def test_quantiles_are_at_equal_steps_from_another_place_on_each_rank(monkeypatch):
    monkeypatch.setattr(regions, "SAMPLES", 4)
    assert local_quantiles(np.arange(0, 160, 10), 0, 1).tolist() == [16, 20, 60, 100, 140]
    assert local_quantiles(np.arange(0, 160, 10), 0, 2).tolist() == [16, 10, 50, 90, 130]
    assert local_quantiles(np.arange(0, 160, 10), 1, 2).tolist() == [16, 30, 70, 110, 150]
    assert local_quantiles(np.array([3, 9]), 0, 1).tolist() == [2, 3, 9, 0, 0]
    assert local_quantiles(np.empty(0, np.int64), 0, 1).tolist() == [0, 0, 0, 0, 0]


def test_indices_up_to_the_largest_vector_are_told_apart():
    """An index is a word of 32 bits."""
    row = local_quantiles(np.array([2**32 - 2, 2**32 - 1]), 0, 1)
    assert row[:3].tolist() == [2, 2**32 - 2, 2**32 - 1]
    assert Distribution(row[None], 2**32).positions[-3:].tolist() == [2**32 - 2, 2**32 - 1, 2**32]
