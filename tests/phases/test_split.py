"""Splitting and reducing: the plans of all ranks fit each other, and need no transport."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.phases.balance import BalancePlan
from horovod_oktopk.phases.regions import Regions, count_by_region

SELECTIONS = st.integers(1, 6).flatmap(lambda size: st.tuples(
    st.lists(st.sets(st.integers(0, 39)).map(sorted), min_size=size, max_size=size),
    st.lists(st.integers(0, 40), min_size=size - 1, max_size=size - 1).map(sorted), st.integers(0, size - 1)))


def regions_of(selections, cuts, rotation):
    boundaries = np.array([0, *cuts, 40])
    counts = np.array([count_by_region(np.array(indices, np.int64), boundaries) for indices in selections])
    return [Regions(boundaries, counts[rank], counts[:, (rank - rotation) % len(counts)], rotation)
            for rank in range(len(counts))]


def assert_plans_fit(plans):
    """Assert that each rank expects what the others send to it."""
    for rank, other in itertools.product(range(len(plans)), repeat=2):
        assert dict(plans[rank][0])[other] == dict(plans[other][1])[rank]


@given(SELECTIONS)
def test_every_element_goes_to_the_owner_of_its_region(case):
    selections, _, _ = case
    plans = [regions.routes(rank) for rank, regions in enumerate(regions_of(*case))]
    regions = regions_of(*case)[0]
    assert_plans_fit(plans)
    for (sent, received), indices in zip(plans, selections, strict=True):
        rest = list(indices)
        for owner, extent in sent:
            part, rest = rest[:extent.length], rest[extent.length:]
            assert all(extent.start <= index < extent.stop for index in part)
            assert extent[1:] == tuple(regions.boundaries[regions.of(owner):][:2])
        assert not rest
        assert [source for source, _ in received] == list(range(len(selections)))


@given(SELECTIONS)
def test_balancing_has_plans_that_fit_each_other_too(case):
    regions = regions_of(*case)
    plan = BalancePlan(sum(each.sent for each in regions))
    assert_plans_fit([plan.routes(each, rank) for rank, each in enumerate(regions)])
    lengths = [extent.length for extent in plan.extents(regions[0].boundaries)]
    assert lengths == np.diff(plan.after).tolist()


@pytest.mark.parametrize("rotation", [0, 2])
def test_an_owner_owns_its_region(rotation):
    nothing = np.zeros(3, np.int64)
    regions = Regions(np.array([0, 1, 2, 3]), nothing, nothing, rotation)
    assert [regions.of(owner) for owner in regions.order] == [0, 1, 2]
    assert regions.order[0] == rotation
