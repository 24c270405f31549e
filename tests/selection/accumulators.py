"""Contract of every accumulator of residuals, as programs: functions of one that is new, and of its pieces.

new(n, dtype) makes an accumulator; piece(array) is a gradient as it takes it, in the memory of this array if it can.
The same list is run over host memory with each kernel, TensorFlow's memory, and PyTorch's devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from horovod_oktopk.kernels import NumpyKernels
from horovod_oktopk.schemes.algorithm import EVERYTHING
from horovod_oktopk.selection.accumulator import CHUNK, NumpyAccumulator
from horovod_oktopk.selection.local_top_k import local_top_k
from horovod_oktopk.vectors.sparse import SparseVector
from tests.support.runs import runs_of

LARGE = float(np.finfo(np.float32).max)
N = 2 * CHUNK + 17
NOTHING = np.empty(0, np.int64)

New = Callable[..., Any]
Piece = Callable[[np.ndarray], Any]


def normal(n: int = N, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def _holding(new: New, piece: Piece, *values: float) -> Any:
    accumulator = new(len(values), np.float32)
    assert accumulator.accumulate([(0, piece(np.array(values, np.float32)))])
    return accumulator


def a_step_that_is_not_committed_leaves_the_residual_bit_for_bit(new: New, piece: Piece) -> None:
    accumulator = new(N, np.float32)
    accumulator.accumulate([(0, piece(normal()))])
    accumulator.commit(np.arange(0, N, 3))
    before = accumulator.read_residual()
    accumulator.accumulate([(0, piece(np.full(N, np.nan, np.float32)))])
    assert accumulator.read_residual().tobytes() == before.tobytes()
    assert accumulator.accumulate([(0, piece(normal(seed=1)))])
    assert accumulator.values().tobytes() == (before + normal(seed=1)).tobytes()


def a_commit_keeps_all_but_what_contributed(new: New, piece: Piece) -> None:
    accumulator, expected = new(N, np.float32), normal()
    accumulator.accumulate([(0, piece(normal()))])
    accumulator.commit(np.array([0, CHUNK, N - 1]))
    expected[[0, CHUNK, N - 1]] = 0
    assert accumulator.read_residual().tobytes() == expected.tobytes()


def where_everything_contributed_nothing_stays(new: New, piece: Piece) -> None:
    accumulator = _holding(new, piece, 1, 2, 3)
    accumulator.commit(EVERYTHING)
    assert accumulator.read_residual().tolist() == [0, 0, 0]


def what_rounding_left_over_is_added_to_the_residual(new: New, piece: Piece) -> None:
    accumulator = _holding(new, piece, 1, 2, 3, 4)
    accumulator.commit(np.array([0, 3]), SparseVector(np.array([0, 2]), np.array([0.25, -0.5], np.float32)))
    assert accumulator.read_residual().tolist() == [0.25, 2, 2.5, 0]


def a_residual_is_read_as_a_copy_and_loaded(new: New, piece: Piece) -> None:
    accumulator = new(N, np.float32)
    accumulator.load_residual(normal())
    read = accumulator.read_residual()
    assert read.tobytes() == normal().tobytes()
    for seed in (1, 2):  # which write into both buffers
        accumulator.accumulate([(0, piece(normal(seed=seed)))])
        accumulator.commit(NOTHING)
    assert read.tobytes() == normal().tobytes()


def pieces_in_any_order_cover_the_vector(new: New, piece: Piece) -> None:
    gradient, accumulator, parts = normal(), new(N, np.float32), ((CHUNK + 5, N), (3, CHUNK + 5), (0, 3))
    accumulator.accumulate([(start, piece(gradient[start:stop].copy())) for start, stop in parts])
    accumulator.commit(NOTHING)
    assert accumulator.read_residual().tobytes() == gradient.tobytes()


def pieces_of_its_own_dtype_are_cleared_where_asked(new: New, piece: Piece) -> None:
    """Pieces of another dtype are not written to: half precision is converted."""
    accumulator, gradient = new(N, np.float32), normal()
    own, half = piece(gradient[:CHUNK].copy()), piece(gradient[CHUNK:].astype(np.float16))
    accumulator.accumulate([(0, own), (CHUNK, half)])
    assert np.array_equal(np.asarray(own.tolist(), np.float32), gradient[:CHUNK])
    accumulator.accumulate([(0, own), (CHUNK, half)], clear=True)
    assert not any(own.tolist())
    halved = gradient[CHUNK:].astype(np.float16)
    assert np.array_equal(np.asarray(half.tolist(), np.float16), halved)
    accumulator.commit(NOTHING)
    expected = np.concatenate([gradient[:CHUNK], halved.astype(np.float32)])
    assert np.array_equal(accumulator.read_residual(), expected)


def one_element_that_is_not_finite_is_noticed_anywhere(new: New, piece: Piece) -> None:
    accumulator = new(N, np.float32)
    for value in (np.nan, np.inf, -np.inf):
        for at in (0, CHUNK - 1, CHUNK, N - 1):
            gradient = normal()
            gradient[at] = value
            assert accumulator.accumulate([(0, piece(gradient))]) is False


def infinities_that_cancel_in_a_sum_are_noticed(new: New, piece: Piece) -> None:
    assert new(2, np.float32).accumulate([(0, piece(np.array([np.inf, -np.inf], np.float32)))]) is False


def an_overflow_of_residual_plus_gradient_is_not_finite(new: New, piece: Piece) -> None:
    accumulator = _holding(new, piece, LARGE, LARGE, LARGE)
    accumulator.commit(NOTHING)
    assert accumulator.accumulate([(0, piece(np.array([0, LARGE, 0], np.float32)))]) is False


def large_values_whose_sum_overflows_are_finite(new: New, piece: Piece) -> None:
    assert new(1000, np.float32).accumulate([(0, piece(np.full(1000, LARGE, np.float32)))]) is True


def select_takes_all_from_the_threshold_on_and_never_zeros(new: New, piece: Piece) -> None:
    accumulator = _holding(new, piece, 1, -2, 0, 3, -1, 1e-45)
    assert accumulator.select(2.0, 6).indices.tolist() == [1, 3]
    assert accumulator.select(2.0, 6).values.tolist() == [-2, 3]
    for threshold in (0.0, 1e-50):  # which is 0 in float32
        assert accumulator.select(threshold, 6).indices.tolist() == [0, 1, 3, 4, 5]


def select_gives_up_past_its_limit(new: New, piece: Piece) -> None:
    accumulator = new(N, np.float32)
    accumulator.accumulate([(0, piece(np.ones(N, np.float32)))])
    assert accumulator.select(1.0, N - 1) is None
    assert len(accumulator.select(1.0, N)) == N


def of_what_is_expected_only_what_passes_is_selected(new: New, piece: Piece) -> None:
    gradient = np.linspace(-3, 3, 100, dtype=np.float32)
    accumulator = new(100, np.float32)
    accumulator.expect_threshold(1.0, 100)
    accumulator.accumulate([(0, piece(gradient.copy()))])
    for threshold in (1.0, 1.5, 3.5):
        found = accumulator.select(threshold, 100).indices.tolist()
        assert found == np.flatnonzero(np.abs(gradient) >= threshold).tolist()


def a_sample_is_every_stride_th_magnitude(new: New, piece: Piece) -> None:
    assert _holding(new, piece, *range(-3, 4)).sample(3).tolist() == [3, 0, 3]


def elements_are_read_at_any_places(new: New, piece: Piece) -> None:
    accumulator, places = new(N, np.float32), np.array([0, 1, CHUNK - 1, CHUNK, CHUNK + 5, N - 1])
    accumulator.accumulate([(0, piece(normal()))])
    assert accumulator.elements_at(runs_of(places)).tobytes() == normal()[places].tobytes()
    assert not len(accumulator.elements_at(runs_of([])))


def moments_are_the_mean_and_the_deviation(new: New, piece: Piece) -> None:
    accumulator = new(N, np.float32)
    accumulator.accumulate([(0, piece(1 + normal()))])
    np.testing.assert_allclose(accumulator.moments(), ((1 + normal()).mean(), normal().std()), rtol=1e-4)


def moments_of_large_values_may_overflow(new: New, piece: Piece) -> None:
    accumulator = new(N, np.float64)
    accumulator.accumulate([(0, piece(np.full(N, 1e200)))])
    mean, deviation = accumulator.moments()
    assert np.isclose(mean, 1e200)
    assert deviation >= 0


def it_selects_and_keeps_the_bits_of_numpy_over_steps(new: New, piece: Piece) -> None:
    n, k = 50_000, 700
    for dtype in (np.float32, np.float64):
        ours, reference = new(n, dtype), NumpyAccumulator(n, dtype, NumpyKernels())
        for step in range(4):
            gradient = normal(n, step, dtype)
            assert reference.accumulate([(0, gradient)])
            assert ours.accumulate([(0, piece(gradient.copy()))])
            expected, found = local_top_k(reference, k), local_top_k(ours, k)
            assert found[0] == expected[0]
            assert found[1].indices.tobytes() == expected[1].indices.tobytes()
            assert found[1].values.tobytes() == expected[1].values.tobytes()
            for accumulator in (ours, reference):
                accumulator.commit(expected[1].indices[::2])
            assert ours.read_residual().tobytes() == reference.read_residual().tobytes()


PROGRAMS: dict[str, Callable[[New, Piece], None]] = {program.__name__: program for program in (
    a_step_that_is_not_committed_leaves_the_residual_bit_for_bit, a_commit_keeps_all_but_what_contributed,
    where_everything_contributed_nothing_stays, what_rounding_left_over_is_added_to_the_residual,
    a_residual_is_read_as_a_copy_and_loaded, pieces_in_any_order_cover_the_vector,
    pieces_of_its_own_dtype_are_cleared_where_asked,
    one_element_that_is_not_finite_is_noticed_anywhere, infinities_that_cancel_in_a_sum_are_noticed,
    an_overflow_of_residual_plus_gradient_is_not_finite, large_values_whose_sum_overflows_are_finite,
    select_takes_all_from_the_threshold_on_and_never_zeros, select_gives_up_past_its_limit,
    of_what_is_expected_only_what_passes_is_selected, a_sample_is_every_stride_th_magnitude,
    elements_are_read_at_any_places, moments_are_the_mean_and_the_deviation, moments_of_large_values_may_overflow,
    it_selects_and_keeps_the_bits_of_numpy_over_steps)}
