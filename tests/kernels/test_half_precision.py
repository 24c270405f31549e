"""Values in bfloat16: the nearest there are, and what is left over is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .test_kernels import BOTH, DTYPES, with_both

EVERY = np.arange(2**16, dtype=np.uint16)
with np.errstate(invalid="ignore"):
    EVERY_NUMBER = (EVERY.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
NUMBERS = np.unique(EVERY_NUMBER[np.isfinite(EVERY_NUMBER)])
"""All finite numbers, ascending: float64."""


def rounding(kernel, values):
    return kernel.from_half(kernel.to_half(values), values.dtype)


@with_both
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_the_nearest_number_is_taken_and_what_is_left_over_is_exact(kernel, values):
    values = np.array(values, np.float32)
    rounded = rounding(kernel, values)
    exact = values.astype(np.float64)
    least = np.array([np.abs(NUMBERS - value).min() for value in exact])
    assert (np.abs(exact - rounded) == least).all()
    assert ((values - rounded).astype(np.float64) == exact - rounded).all()
    assert (np.signbit(rounded) == np.signbit(values)).all()


@with_both
def test_ties_go_to_the_even_neighbour(kernel):
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    assert rounding(kernel, values).tolist() == [1, 1 + 2**-6]


@with_both
def test_the_largest_floats_do_not_become_infinite(kernel):
    for largest in (np.finfo(np.float32).max, np.finfo(np.float64).max):
        assert rounding(kernel, np.array([largest, -largest])).tolist() == [NUMBERS[-1], NUMBERS[0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_the_same_in_both_and_survives(dtype):
    plain, native = (kernel.from_half(EVERY, dtype) for kernel in BOTH)
    number = ~np.isnan(plain)
    assert plain[number].tobytes() == native[number].tobytes()
    assert np.isnan(native[~number]).all()
    finite = np.isfinite(plain)
    for kernel in BOTH:
        assert (kernel.to_half(plain[finite]) == EVERY[finite]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 40, 3000]))
def test_both_round_numbers_of_all_sizes_to_the_same_bits(dtype, seed, n):
    """Numbers of any exponent, near the middle between two numbers as often as not, denormals included."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**(8 * dtype().itemsize), n, np.uint64).astype(f"u{dtype().itemsize}").view(dtype)
    middles = ((rng.integers(0, 2**16, n) << 16) + rng.choice([0x7FFF, 0x8000, 0x8001], n)).astype(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(rng.random(n) < 0.5, values, middles.view(np.float32).astype(dtype)).astype(dtype)
    values = values[np.isfinite(values)]
    plain, native = (kernel.to_half(values) for kernel in BOTH)
    assert plain.tobytes() == native.tobytes()
