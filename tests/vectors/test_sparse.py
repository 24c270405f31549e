"""Sparse vectors: splitting, and sums in rank order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.vectors.layout import Layout
from horovod_oktopk.vectors.sparse import SparseVector, sum_of

from ..support.oracle import rank_order_sum

N = 40


def vector(indices):
    return SparseVector(np.array(indices, np.int64), np.array(indices, np.float32) + 1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_a_sum_has_the_bits_of_rank_order(seed, size):
    rng = np.random.default_rng(seed)
    parts = np.where(rng.random((size, N)) < 0.4, rng.standard_normal((size, N)) * 10.0 ** rng.integers(-6, 6, N), 0)
    parts = parts.astype(np.float32)
    held = [np.flatnonzero(part) for part in parts]
    result = sum_of([SparseVector(indices, part[indices]) for indices, part in zip(held, parts, strict=True)])
    assert result.indices.tolist() == np.flatnonzero(parts.any(axis=0)).tolist()
    assert result.values.tobytes() == rank_order_sum(list(parts))[result.indices].tobytes()


def test_elements_that_cancel_stay_in_a_sum():
    total = sum_of([SparseVector(np.array([3]), np.array([value], np.float32)) for value in (2, -2)])
    assert (total.indices.tolist(), total.values.tolist()) == ([3], [0])


@given(st.sets(st.integers(0, N - 1)), st.lists(st.integers(0, N), max_size=5))
def test_parts_of_an_update_lie_in_their_gradients_and_join_again(indices, cuts):
    layout = Layout([("p", (length,), "float32") for length in np.diff([0, *sorted(cuts), N]).tolist()])
    whole, starts = vector(sorted(indices)), layout.offsets[:-1]
    parts = list(layout.parts(whole))
    for part, (_, shape, _) in zip(parts, layout.entries, strict=True):
        assert ((part.indices >= 0) & (part.indices < shape)).all()
    assert [*np.concatenate([part.indices + at for part, at in zip(parts, starts, strict=True)])] == sorted(indices)
