"""Values in 4 bits: where the levels lie, and what a message says of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.kernels import KERNELS, NumpyKernels
from horovod_oktopk.vectors.sparse import SparseVector
from horovod_oktopk.vectors.wire import WireCodec, levels_between

DTYPES = st.sampled_from(["float32", "float64"])
ENDS = st.tuples(st.floats(0, 3e38), st.floats(0, 3e38)).map(sorted)


def levels(lowest, largest):
    return levels_between(KERNELS.to_half(np.array([lowest, largest])))


def drawn(seed, count, dtype, octaves=10.0, scale=1.0):
    """Draw magnitudes that spread over this many octaves."""
    rng = np.random.default_rng(seed)
    values = scale * 2.0 ** rng.uniform(0, octaves, count) * rng.choice([-1, 1], count)
    return values.astype(dtype)


def codec_of(values, lowest=None, **options):
    """Return the codec for these values."""
    sizes = np.abs(values)
    lowest = float(sizes.min()) if lowest is None else lowest
    return WireCodec(values.dtype, "log4", **options).for_magnitudes(lowest, float(sizes.max()))


def rounded(values, lowest=None):
    return codec_of(values, lowest).round(SparseVector(np.arange(len(values)), values)).values


@given(ENDS)
def test_levels_ascend_are_finite_and_bfloat16(ends):
    found = levels(*ends)
    assert (np.diff(found) >= 0).all()
    assert np.isfinite(found).all()
    assert (KERNELS.from_half(KERNELS.to_half(found), np.float32) == found).all()


@given(st.floats(1e-30, 1e30), st.floats(0, 20))
def test_levels_grow_by_about_the_same_factor_from_the_lowest_to_the_largest(lowest, octaves):
    largest = lowest * 2**octaves
    found = levels(lowest, largest)
    assert np.allclose(found[[0, -1]], [lowest, largest], rtol=2**-8)
    factors = np.log2(found[1:]) - np.log2(found[:-1])
    assert np.abs(factors - octaves / 7).max() < 0.2


@pytest.mark.parametrize("largest", [1.0, 1e30, 1e-30])
def test_of_an_unknown_lowest_one_level_is_zero_and_the_others_span_eight_octaves(largest):
    found = levels(0.0, largest)
    assert found[0] == 0
    assert found[-1] == pytest.approx(largest, rel=2**-8)
    assert found[1] == pytest.approx(largest / 2**8, rel=0.01)


@pytest.mark.parametrize("extreme", [5e-324, 1e-45, 1e-40, 1e-38, 3.4e38, 1e300, 1.7e308])
@pytest.mark.parametrize("known", [True, False])
def test_no_magnitude_becomes_infinite_or_nan(extreme, known):
    values = np.array([extreme, -extreme / 2, extreme / 3])
    sent = rounded(values, None if known else 0.0)
    assert np.isfinite(sent).all()
    assert (np.abs(sent) <= np.abs(values).max() * (1 + 2**-8)).all() or extreme < 1e-37


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1.0, 5.0, 10.0, 60.0]), DTYPES)
def test_what_is_left_over_is_exact_and_at_most_half_a_gap(seed, octaves, dtype):
    values = drawn(seed, 50, dtype, octaves)
    sent = rounded(values)
    exact = values.astype(np.float128) - sent
    assert ((values - sent) == exact).all()
    found = levels(np.abs(values).min(), np.abs(values).max()).astype(np.float64)
    gap = np.diff(found).max() + found[-1] * 2**-7
    assert (np.abs(exact) <= gap / 2).all()
    assert (np.abs(exact) <= np.abs(values)).all()


def test_the_largest_element_is_sent_nearly_whole_however_small_the_others_are():
    values = np.append(drawn(0, 99, "float32", 2.0), np.float32(5000))
    sent = rounded(values)
    assert sent[-1] == pytest.approx(5000, rel=2**-8)
    assert (sent[:-1] / values[:-1] > 0.4).all()


@given(st.integers(0, 2**32 - 1), DTYPES, st.sampled_from([0.0, None]), st.lists(st.integers(0, 60), max_size=4))
def test_rounded_values_arrive_bit_for_bit_whatever_messages_they_are_divided_into(seed, dtype, lowest, cuts):
    """Also those of only one or two elements, and whoever writes and reads them: it need not know the ends."""
    values = drawn(seed, 60, dtype)
    codec, plain = codec_of(values, lowest), codec_of(values, lowest, kernels=NumpyKernels())
    vector = codec.round(SparseVector(np.arange(60) * 3, values))
    reader = WireCodec(values.dtype, "log4", NumpyKernels())
    for start, stop in itertools.pairwise([0, *sorted(cuts), 60]):
        part = vector[start:stop]
        message = codec.encode(part, 3 * start, 3 * stop)
        assert message.tobytes() == plain.encode(part, 3 * start, 3 * stop).tobytes()
        assert len(message) == reader.size(len(part), 3 * (stop - start))
        decoded = reader.decode(message, len(part), 3 * start, 3 * stop)
        assert decoded.values.tobytes() == part.values.tobytes()
        assert decoded.indices.tolist() == part.indices.tolist()


def test_a_message_takes_4_bits_a_value_and_a_word_and_never_more_than_in_16_bits():
    plain, brain, log4 = (WireCodec(np.dtype("float32"), name) for name in (None, "bfloat16", "log4"))
    for count in [*range(40), 5000]:
        indices = plain.size(count, 10**6) - 4 * count
        assert log4.size(count, 10**6) <= brain.size(count, 10**6)
        assert log4.size(count, 10**6) - indices <= 4 * (1 + -(-count // 8))
