"""Values in 16 bits: the nearest there are, and what is left over is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.kernels import NATIVE, NumpyKernels
from horovod_oktopk.kernels.numpy_kernels import from_half

BOTH = [NumpyKernels(), NATIVE]
with_both = pytest.mark.parametrize("kernel", BOTH, ids=lambda kernel: kernel.name)
NAMES = ["float16", "bfloat16"]


def numbers(name):
    """All finite numbers of the format, ascending: float64."""
    bits = np.arange(2**16, dtype=np.uint16)
    every = from_half(bits, name, np.float64)
    return np.unique(every[np.isfinite(every)])


ALL = {name: numbers(name) for name in NAMES}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounding(kernel, values, name):
    return kernel.from_half(kernel.to_half(values, name), name, values.dtype)


@with_both
@given(st.lists(FLOATS, min_size=1, max_size=20), st.sampled_from(NAMES))
def test_the_nearest_number_is_taken_and_what_is_left_over_is_exact(kernel, values, name):
    values = np.array(values, np.float32)
    rounded = rounding(kernel, values, name)
    exact = values.astype(np.float64)
    near = np.abs(exact) < (65520 if name == "float16" else 2.0**128 - 2.0**119)
    least = np.array([np.abs(ALL[name] - value).min() for value in exact])
    assert (np.abs(exact - rounded)[near] == least[near]).all()
    whole = np.abs(values) < 2.0**39 if name == "float16" else np.isfinite(values)
    assert ((values - rounded).astype(np.float64) == exact - rounded)[whole].all()
    assert (np.signbit(rounded) == np.signbit(values)).all()
    assert np.isfinite(rounded).all()


@with_both
def test_ties_go_to_the_even_neighbour(kernel):
    for name, last in (("bfloat16", 2**-7), ("float16", 2**-10)):
        values = np.array([1 + last / 2, 1 + 3 * last / 2], np.float32)
        assert rounding(kernel, values, name).tolist() == [1, 1 + 2 * last]


@with_both
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_exceeds_float16_is_sent_in_part(kernel, dtype):
    values = np.array([65504, 65520, -1e9, 2.0**38 + 2**15], dtype)
    rounded = rounding(kernel, values, "float16")
    assert rounded.tolist() == [65504, 32768, -32768, 32768]
    assert (values - rounded).tolist() == [0, 65520 - 32768, -1e9 + 32768, 2.0**38]


@with_both
def test_the_largest_floats_do_not_become_infinite_in_bfloat16(kernel):
    for largest in (np.finfo(np.float32).max, np.finfo(np.float64).max):
        rounded = rounding(kernel, np.array([largest, -largest]), "bfloat16")
        assert rounded.tolist() == [ALL["bfloat16"][-1], ALL["bfloat16"][0]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_number_of_16_bits_is_the_same_in_both_and_survives(name, dtype):
    every = np.arange(2**16, dtype=np.uint16)
    plain, native = (kernel.from_half(every, name, dtype) for kernel in BOTH)
    number = ~np.isnan(plain)
    assert plain[number].tobytes() == native[number].tobytes()
    assert np.isnan(native[~number]).all()
    finite = np.isfinite(plain)
    for kernel in BOTH:
        assert (kernel.to_half(plain[finite], name) == every[finite]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 40, 3000]))
def test_both_round_numbers_of_all_sizes_to_the_same_bits(name, dtype, seed, n):
    """Of any exponent, near the middle between two numbers of 16 bits as often as not, denormals included."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**(8 * dtype().itemsize), n, np.uint64).astype(f"u{dtype().itemsize}").view(dtype)
    brains = (rng.integers(0, 2**16, n) << 16) + rng.choice([0x7FFF, 0x8000, 0x8001], n)
    middles = (brains.astype(np.uint32).view(np.float32) if name == "bfloat16"
               else rng.integers(-2**13, 2**13, n) * 2.0**rng.integers(-27, 5, n))
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(rng.random(n) < 0.5, values, middles.astype(dtype)).astype(dtype)
    values = values[np.isfinite(values)]
    plain, native = (kernel.to_half(values, name) for kernel in BOTH)
    assert plain.tobytes() == native.tobytes()
