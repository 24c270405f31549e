"""Values in 16 bits: the nearest there are, and what is left over is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.core.halves import from_halves, to_halves

NAMES = ["float16", "bfloat16"]


def numbers(name):
    """All finite numbers of the format, ascending: float64."""
    bits = np.arange(2**16, dtype=np.uint16)
    every = from_halves(bits, name, np.float64)
    return np.unique(every[np.isfinite(every)])


ALL = {name: numbers(name) for name in NAMES}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FLOATS, min_size=1, max_size=20), st.sampled_from(NAMES))
def test_the_nearest_number_is_taken_and_what_is_left_over_is_exact(values, name):
    values = np.array(values, np.float32)
    rounded = from_halves(to_halves(values, name), name, np.float32)
    exact = values.astype(np.float64)
    near = np.abs(exact) < (65520 if name == "float16" else 2.0**128 - 2.0**119)
    least = np.array([np.abs(ALL[name] - value).min() for value in exact])
    assert (np.abs(exact - rounded)[near] == least[near]).all()
    whole = np.abs(values) < 2.0**39 if name == "float16" else np.isfinite(values)
    assert ((values - rounded).astype(np.float64) == exact - rounded)[whole].all()
    assert (np.signbit(rounded) == np.signbit(values)).all()
    assert np.isfinite(rounded).all()


def test_ties_go_to_the_even_neighbour():
    assert from_halves(to_halves(np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32), "bfloat16"), "bfloat16",
                       np.float32).tolist() == [1, 1 + 4 * 2**-8]
    assert from_halves(to_halves(np.array([1 + 2**-11, 1 + 3 * 2**-11], np.float32), "float16"), "float16",
                       np.float32).tolist() == [1, 1 + 4 * 2**-11]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_exceeds_float16_is_sent_in_part(dtype):
    values = np.array([65504, 65520, -1e9, 2.0**38 + 2**15], dtype)
    rounded = from_halves(to_halves(values, "float16"), "float16", dtype)
    assert rounded.tolist() == [65504, 32768, -32768, 32768]
    assert (values - rounded).tolist() == [0, 65520 - 32768, -1e9 + 32768, 2.0**38]


def test_the_largest_floats_do_not_become_infinite_in_bfloat16():
    for largest in (np.finfo(np.float32).max, np.finfo(np.float64).max):
        halves = to_halves(np.array([largest, -largest]), "bfloat16")
        assert from_halves(halves, "bfloat16", np.float64).tolist() == [ALL["bfloat16"][-1], ALL["bfloat16"][0]]
