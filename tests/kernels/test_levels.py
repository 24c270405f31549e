"""Values in 4 bits: the nearest of eight levels, with the same bits in C++ and in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .test_kernels import BOTH, DTYPES, nasty, with_both

COUNTS = st.sampled_from([0, 1, 7, 8, 9, 100, 8191, 8192, 8193, 20_000])


def drawn_levels(rng):
    """Return levels of all sizes, some of them equal, the first one sometimes 0."""
    levels = np.sort(np.abs(nasty(rng, 8, np.float32, finite=True)))
    levels[rng.integers(1, 8)] = levels[-1]
    return np.sort(levels)


@with_both
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1))
def test_the_nearest_level_is_taken_with_the_sign(kernel, dtype, seed):
    rng = np.random.default_rng(seed)
    levels, values = drawn_levels(rng), nasty(rng, 40, dtype, finite=True)
    rounded = kernel.from_levels(kernel.to_levels(values, levels), 40, levels, dtype)
    assert rounded.dtype == dtype
    assert (np.signbit(rounded) == np.signbit(values)).all()
    sizes = np.abs(values.astype(np.float64))
    distances = np.abs(sizes[:, None] - levels.astype(np.float64))
    assert (np.abs(sizes - np.abs(rounded)) == distances.min(axis=1)).all()


@with_both
def test_a_tie_goes_to_the_larger_level(kernel):
    levels = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.float32)
    values = np.array([1.5, -3, 6, -96, 95], np.float32)
    words = kernel.to_levels(values, levels)
    assert kernel.from_levels(words, 5, levels, np.float32).tolist() == [2, -4, 8, -128, 64]


@with_both
def test_eight_codes_are_a_word_the_first_in_the_lowest_bits(kernel):
    levels = np.arange(8, dtype=np.float32)
    words = kernel.to_levels(np.array([0, 1, 2, 3, 4, 5, 6, 7, -1, -7], np.float32), levels)
    assert words.dtype == np.uint32
    assert [hex(word) for word in words] == ["0x76543210", "0xf9"]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), COUNTS)
def test_both_have_the_same_bits(dtype, seed, count):
    rng = np.random.default_rng(seed)
    levels, values = drawn_levels(rng), nasty(rng, count, dtype)
    at = rng.random(count) < 0.3  # in the middle between two levels, or beside it
    first = rng.integers(0, 7, count)
    middles = (levels[first].astype(np.float64) + levels[first + 1]) / 2
    with np.errstate(over="ignore"):
        values = np.where(at, middles * rng.choice([1, -1, 1 - 1e-7, 1 + 1e-7], count), values).astype(dtype)
    plain, native = (kernel.to_levels(values, levels) for kernel in BOTH)
    assert plain.tobytes() == native.tobytes()
    assert len(plain) == -(-count // 8)
    found = [kernel.from_levels(plain, count, levels, dtype).tobytes() for kernel in BOTH]
    assert found[0] == found[1]
    assert len(found[0]) == values.nbytes


@pytest.mark.parametrize("block", [8, 64, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), COUNTS)
def test_blocks_have_scales_of_their_own_and_the_same_bits_in_both(block, dtype, seed, count):
    rng = np.random.default_rng(seed)
    levels = np.append(0, np.geomspace(0.01, 1, 7)).astype(np.float32)
    values = nasty(rng, count, dtype)
    values[:count // 2] = nasty(rng, count // 2, dtype, finite=True)
    (words, scales), (others, again) = (kernel.to_blocks(values, levels, block) for kernel in BOTH)
    assert (words.tobytes(), scales.tobytes()) == (others.tobytes(), again.tobytes())
    assert (len(words), len(scales)) == (-(-count // 8), -(-count // block))
    rounded, same = (kernel.from_blocks(words, scales, count, levels, block, dtype) for kernel in BOTH)
    assert rounded.tobytes() == same.tobytes()
    for start in range(0, count, block):
        part, found = values[start:start + block], rounded[start:start + block]
        if not np.isfinite(part).all():
            assert np.isposinf(found).all(), "a block that has overflowed is seen on all ranks"
            continue
        largest = min(float(np.abs(part).max()), float(np.finfo(np.float32).max))
        assert float(np.abs(found).max()) == pytest.approx(largest, rel=0.01, abs=1e-37)
        assert (np.signbit(found) == np.signbit(part)).all()


def test_the_native_kernels_refuse_what_would_leave_their_arrays():
    native = pytest.importorskip("horovod_oktopk.kernels._native")
    eight, words = np.ones(8, np.float32), np.zeros(2, np.uint32)
    for few in (eight[:7], eight[:0]):
        with pytest.raises(ValueError, match="eight levels"):
            native.to_levels(np.ones(3, np.float32), few)
        with pytest.raises(ValueError, match="eight levels"):
            native.from_levels(words, 3, few, np.float32)
    for count in (-1, 17):
        with pytest.raises(ValueError, match="fewer words"):
            native.from_levels(words, count, eight, np.float64)
    with pytest.raises(ValueError, match="fewer scales"):
        native.from_blocks(words, np.zeros(1, np.uint16), 9, eight, 8, np.float32)
    for block in (0, 4, 100):
        with pytest.raises(ValueError, match="a block must have 8 to 8192 values"):
            native.to_blocks(np.ones(3, np.float32), eight, block)
