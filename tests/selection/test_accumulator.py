"""The dense side in host memory: residual + gradient, undone by not committing, without temporaries of n."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from horovod_oktopk import OkTopk
from horovod_oktopk.kernels import NativeKernels, NumpyKernels
from horovod_oktopk.selection.accumulator import CHUNK, NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.transport.local import LocalTransport, LocalWorld

LARGE = float(np.finfo(np.float32).max)
N = 2 * CHUNK + 17


def normal(n=N, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def test_a_step_that_is_not_committed_leaves_the_residual_bit_for_bit():
    acc = NumpyAccumulator(N)
    acc.accumulate([(0, normal())])
    acc.commit(np.arange(0, N, 3))
    before = acc.residual.tobytes()
    acc.accumulate([(0, np.full(N, np.nan, np.float32))], scale=3.0)
    assert acc.residual.tobytes() == before
    assert acc.accumulate([(0, normal(seed=1))])
    assert acc.select(0.0, N).values.tobytes() == (np.frombuffer(before, np.float32) + normal(seed=1)).tobytes()


def test_commit_keeps_all_but_what_contributed():
    acc = NumpyAccumulator(N)
    acc.accumulate([(0, normal())])
    acc.commit(np.array([0, CHUNK, N - 1]))
    expected = normal()
    expected[[0, CHUNK, N - 1]] = 0
    assert acc.residual.tobytes() == expected.tobytes()


def test_pieces_in_any_order_cover_the_vector():
    gradient, acc = normal(), NumpyAccumulator(N)
    acc.accumulate([(CHUNK + 5, gradient[CHUNK + 5:]), (3, gradient[3:CHUNK + 5]), (0, gradient[:3])])
    acc.commit(np.empty(0, np.int64))
    assert acc.residual.tobytes() == gradient.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scale_converts_the_residual_and_not_the_gradient(dtype):
    acc = NumpyAccumulator(N, dtype)
    acc.accumulate([(0, normal(dtype=dtype))])
    acc.commit(np.empty(0, np.int64))
    acc.accumulate([(0, normal(seed=1, dtype=dtype))], scale=0.25)
    acc.commit(np.empty(0, np.int64))
    assert acc.residual.tobytes() == (normal(dtype=dtype) * dtype(0.25) + normal(seed=1, dtype=dtype)).tobytes()


@pytest.mark.parametrize("kernels", [NumpyKernels(), NativeKernels()], ids=lambda kernels: kernels.name)
def test_pieces_of_its_own_dtype_are_cleared_where_asked(kernels):
    acc, gradient = NumpyAccumulator(N, kernels=kernels), normal()
    own, half = gradient[:CHUNK].copy(), gradient[CHUNK:].astype(np.float16)
    own.flags.writeable = False  # nobody writes what is not to be cleared
    acc.accumulate([(0, own), (CHUNK, half)])
    own.flags.writeable = True
    acc.accumulate([(0, own), (CHUNK, half)], clear=True)
    assert not own.any()
    assert np.array_equal(half, gradient[CHUNK:].astype(np.float16))
    acc.commit(np.empty(0, np.int64))
    assert np.array_equal(acc.residual, np.concatenate([gradient[:CHUNK], half.astype(np.float32)]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, N - 1])
def test_one_bad_element_anywhere_is_noticed(value, at):
    gradient = normal()
    gradient[at] = value
    assert NumpyAccumulator(N).accumulate([(0, gradient)]) is False


def test_infinities_that_cancel_in_a_sum_are_noticed():
    assert NumpyAccumulator(2).accumulate([(0, np.array([np.inf, -np.inf], np.float32))]) is False


def test_an_overflow_of_residual_plus_gradient_is_not_finite():
    acc = NumpyAccumulator(3)
    assert acc.accumulate([(0, np.full(3, LARGE, np.float32))])
    acc.commit(np.empty(0, np.int64))
    assert acc.accumulate([(0, np.array([0, LARGE, 0], np.float32))]) is False


def test_large_values_whose_sum_overflows_are_finite():
    assert NumpyAccumulator(1000).accumulate([(0, np.full(1000, LARGE, np.float32))]) is True


def test_select_takes_all_from_the_threshold_on_and_never_zeros():
    acc = NumpyAccumulator(5)
    acc.accumulate([(0, np.array([1, -2, 0, 3, -1], np.float32))])
    assert acc.select(2.0, 5).indices.tolist() == [1, 3]
    assert acc.select(2.0, 5).values.tolist() == [-2, 3]
    assert acc.select(0.0, 5).indices.tolist() == [0, 1, 3, 4]


def test_select_gives_up_past_its_limit():
    acc = NumpyAccumulator(N)
    acc.accumulate([(0, np.ones(N, np.float32))])
    assert acc.select(1.0, N - 1) is None
    assert len(acc.select(1.0, N)) == N


def test_a_sample_is_every_stride_th_magnitude():
    acc = NumpyAccumulator(7)
    acc.accumulate([(0, np.arange(-3, 4, dtype=np.float32))])
    assert acc.sample(3).tolist() == [3, 0, 3]


def peaks(n, k, steps):
    """Largest number of bytes allocated at once, in each step of one rank."""
    acc, scheme = NumpyAccumulator(n), OkTopk().build("test: yes")
    transport = CountingTransport(LocalTransport(LocalWorld(1), 0))
    found = []
    for step in range(steps):
        gradient = normal(n, step)
        tracemalloc.start()
        finite = acc.accumulate([(0, gradient)])
        acc.commit(scheme.reduce(acc, k, finite, transport).contributed)
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_no_step_allocates_anything_of_size_n(density):
    n = 2_000_000
    assert max(peaks(n, round(density * n), 3)) < 1.25 * n  # bytes; n elements have 4 n


@pytest.mark.parametrize("threshold", [1.0, 1.5, 3.5])
def test_of_what_was_collected_only_what_passes_is_selected(threshold):
    acc = NumpyAccumulator(100)
    acc.expect(1.0, 100)
    gradient = np.linspace(-3, 3, 100, dtype=np.float32)
    acc.accumulate([(0, gradient)])
    assert acc.select(threshold, 100).indices.tolist() == np.flatnonzero(np.abs(gradient) >= threshold).tolist()
