"""w - p in host memory: read in place, never stored."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from horovod_oktopk.kernels import NATIVE, NumpyKernels
from horovod_oktopk.selection.local_top_k import local_top_k
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.vectors.sparse import RunVector, SparseVector

from ..support.runs import runs_of
from .accumulators import CHUNK, N, normal

CUTS = [3, 900, CHUNK + 5]


def pieces_of(values, cuts=CUTS):
    return list(zip([0, *cuts], np.split(values, cuts), strict=True))


def started(dtype=np.float32, moved=1, **arguments):
    """Return an accumulator, and what it is to hold."""
    w, p = normal(dtype=dtype), normal(seed=moved, dtype=dtype)
    accumulator = NumpyParameterAccumulator(N, dtype, **arguments)
    accumulator.start(pieces_of(w))
    assert accumulator.accumulate(pieces_of(p))
    return accumulator, w - p


@pytest.mark.parametrize("kernels", [NumpyKernels(), NATIVE], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_algorithms_see_is_the_difference(dtype, kernels):
    accumulator, acc = started(dtype, kernels=kernels)
    assert accumulator.values().tobytes() == acc.tobytes()
    for stride in (1, 7, 1000):
        assert accumulator.sample(stride).tobytes() == np.abs(acc[::stride]).tobytes()
    places = np.array([0, 2, 3, 899, 900, CHUNK + 4, CHUNK + 5, N - 1])
    assert accumulator.elements_at(runs_of(places)).tobytes() == acc[places].tobytes()
    assert not len(accumulator.elements_at(runs_of([])))
    assert accumulator.moments() == pytest.approx((acc.mean(), acc.std()), rel=1e-4, abs=1e-6)
    found = accumulator.select(2.5, N)
    assert found.indices.tolist() == np.flatnonzero(np.abs(acc) >= 2.5).tolist()
    assert found.values.tobytes() == acc[found.indices].tobytes()
    assert accumulator.select(2.5, 10) is None


def test_what_is_expected_is_collected_in_the_pass():
    accumulator, acc = started()
    threshold, first = local_top_k(accumulator, 500)
    accumulator.accumulate(pieces_of(normal(seed=1)))
    collected = accumulator._candidates
    assert 500 <= collected.count <= collected.capacity
    again = local_top_k(accumulator, 500)
    assert (again[0], again[1].indices.tolist()) == (threshold, first.indices.tolist())
    assert first.values.tobytes() == acc[first.indices].tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_and_what_only_sums_to_infinity_is_not(value):
    accumulator, _ = started()
    p = normal(seed=1)
    p[CHUNK + 20] = value
    assert not accumulator.accumulate(pieces_of(p))
    large = np.full(N, -3e38, np.float32)
    accumulator.start(pieces_of(np.zeros(N, np.float32)))
    assert accumulator.accumulate(pieces_of(large))


def test_an_update_moves_the_shared_parameters_and_nothing_else():
    accumulator, _ = started()
    before = accumulator.shared.copy()
    accumulator.commit(SparseVector(np.array([0, 5, N - 1]), np.array([1, 2, 3], np.float32)))
    expected = before.copy()
    expected[[0, 5, N - 1]] -= np.array([1, 2, 3], np.float32)
    assert accumulator.shared.tobytes() == expected.tobytes()
    accumulator.commit(RunVector.between(0, np.ones(N, np.float32)))
    assert accumulator.shared.tobytes() == (expected - np.float32(1)).tobytes()


def test_a_pass_needs_no_memory_beside_the_shared_parameters():
    accumulator, _ = started()
    pieces = pieces_of(normal(seed=1))
    local_top_k(accumulator, 100)
    tracemalloc.start()
    accumulator.accumulate(pieces)
    accumulator.select(accumulator.expected, N)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < accumulator.shared.nbytes / 20
