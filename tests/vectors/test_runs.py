"""Places in runs, and vectors there, are what a list of all places would be."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.vectors.runs import Runs
from horovod_oktopk.vectors.sparse import RunVector, SparseVector, concatenate, sum_of

from ..support.runs import runs_of

N = 40
PLACES = st.sets(st.integers(0, N - 1)).map(sorted)
BOUNDS = st.lists(st.integers(0, N), min_size=1).map(sorted).map(np.array)


def vectors(places, seed=0):
    """Return one vector in both forms."""
    values = np.random.default_rng(seed).standard_normal(len(places)).astype(np.float32)
    return RunVector(runs_of(places), values), SparseVector(np.array(places, np.int64), values)


def assert_same(ours, expected):
    assert isinstance(ours, RunVector)
    assert len(ours) == len(expected)
    assert ours.indices.tolist() == expected.indices.tolist()
    assert ours.indices.dtype == np.int64
    assert ours.values.tobytes() == expected.values.tobytes()


@given(PLACES, BOUNDS, st.integers(0, N), st.integers(0, N), st.integers(-5, 5))
def test_a_vector_in_runs_is_cut_and_shifted_as_one_with_indices(places, bounds, start, stop, by):
    ours, expected = vectors(places)
    assert_same(ours, expected)
    assert ours.numbers_below(bounds).tolist() == expected.numbers_below(bounds).tolist()
    assert_same(ours[start:stop], expected[start:stop])
    assert_same(ours[start:], expected[start:])
    assert_same(ours.shifted(by), expected.shifted(by))
    assert_same(ours[start:stop].shifted(by)[1:], expected[start:stop].shifted(by)[1:])
    assert_same(ours.divided(3), expected.divided(3))


@given(PLACES, st.lists(st.integers(0, N)).map(sorted))
def test_parts_are_joined_again(places, cuts):
    ours, expected = vectors(places)
    parts = [ours[start:stop] for start, stop in itertools.pairwise([0, *cuts, N])]
    if places:
        assert_same(concatenate(parts, np.float32), expected)
    else:
        assert not len(concatenate(parts, np.float32))
    mixed = concatenate([parts[0], *(SparseVector(part.indices, part.values) for part in parts[1:])], np.float32)
    assert mixed.indices.tolist() == expected.indices.tolist()


@given(st.lists(PLACES, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_sums_have_the_bits_of_vectors_with_indices(places, same, one_is_empty):
    places = [places[0] for _ in places] if same else places
    ours, expected = zip(*(vectors(each, seed) for seed, each in enumerate(places)), strict=True)
    ours = [*ours, SparseVector.empty(np.float32)] if one_is_empty else ours
    total, wanted = sum_of(ours), sum_of(expected)
    assert total.indices.tolist() == wanted.indices.tolist()
    assert total.values.tobytes() == wanted.values.tobytes()
    assert isinstance(total, RunVector) == (any(places) and len({tuple(each) for each in places if each}) == 1)


@given(PLACES, st.integers(-3, 0))
def test_a_vector_is_added_to_a_part_of_an_array(places, first):
    ours, expected = vectors(places)
    out = np.ones(N - first, np.float32)
    wanted = out.copy()
    wanted[expected.indices - first] += expected.values
    for vector in (ours, expected):
        found = out.copy()
        vector.add_to(found, first)
        assert found.tobytes() == wanted.tobytes()


@given(st.sets(st.integers(0, 9)).map(sorted), st.integers(1, 39))
def test_blocks_are_runs_and_the_last_of_all_may_be_shorter(blocks, n):
    blocks = [block for block in blocks if 4 * block < n]
    places = [place for block in blocks for place in range(4 * block, min(4 * block + 4, n))]
    assert Runs.of_blocks(np.array(blocks, np.int64), 4, n).indices.tolist() == places
