"""Sparse vectors as bytes: what comes back is what went in, in as few bytes as told beforehand; and what is
malformed is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.errors import WireError
from horovod_oktopk.kernels import KERNELS, NumpyKernels
from horovod_oktopk.vectors.sparse import SparseVector
from horovod_oktopk.vectors.wire import BLOCK, WireCodec

EVERY_KERNELS = {kernels.name: kernels for kernels in (KERNELS, NumpyKernels())}
KERNEL_NAMES = st.sampled_from(sorted(EVERY_KERNELS))


@st.composite
def regions(draw):
    """Draw (start, stop, indices within): sparse and dense ones, up to the ends."""
    span = draw(st.sampled_from([1, 2, 31, 32, 33, 64, 500, 2**20, 2**32]))
    start = draw(st.sampled_from([0, 7, 2**32 - span] if span < 2**32 else [0]))
    offsets = draw(st.one_of(
        st.sets(st.integers(0, span - 1), max_size=40),
        st.integers(0, min(span, 500)).map(range),
        st.integers(0, min(span, 500)).map(lambda count: range(span - count, span))))
    return start, start + span, np.array(sorted(offsets), np.int64) + start


@st.composite
def vectors(draw):
    dtype = draw(st.sampled_from(["float32", "float64"]))
    start, stop, indices = draw(regions())
    seed = draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).integers(0, 2**63, len(indices)).astype(f"u{np.dtype(dtype).itemsize}")
    return start, stop, SparseVector(indices, bits.view(dtype))


def same(left, right):
    return left.indices.tolist() == right.indices.tolist() and left.values.tobytes() == right.values.tobytes()


@given(vectors(), KERNEL_NAMES, KERNEL_NAMES)
def test_a_message_holds_the_vector_bit_for_bit_whoever_wrote_it(case, writer, reader):
    start, stop, vector = case
    dtype = vector.values.dtype
    message = WireCodec(dtype, kernels=EVERY_KERNELS[writer]).encode(vector, start, stop)
    codec = WireCodec(dtype, kernels=EVERY_KERNELS[reader])
    assert message.dtype == np.uint8
    assert len(message) == codec.size(len(vector), stop - start)
    decoded = codec.decode(message, len(vector), start, stop)
    assert decoded.values.dtype == dtype
    assert same(decoded, vector)


@given(regions(), st.sampled_from(["float32", "float64"]))
def test_halves_arrive_as_they_were_rounded(region, dtype):
    start, stop, indices = region
    codec = WireCodec(np.dtype(dtype), "bfloat16")
    rounded = codec.round(SparseVector(indices, np.random.default_rng(0).standard_normal(len(indices)).astype(dtype)))
    message = codec.encode(rounded, start, stop)
    assert len(message) == codec.size(len(indices), stop - start)
    assert same(codec.decode(message, len(indices), start, stop), rounded)


@given(st.integers(0, 500), st.integers(0, 8), st.sampled_from(["float32", "float64"]), KERNEL_NAMES)
def test_blocks_arrive_as_they_were_rounded_also_in_several_messages(count, cut, dtype, name):
    codec = WireCodec(np.dtype(dtype), "log4 blocks", EVERY_KERNELS[name])
    values = np.random.default_rng(count).standard_normal(count) * 10.0 ** (np.arange(count) // BLOCK)
    vector = SparseVector(np.arange(count), values.astype(dtype))
    rounded = codec.round(vector)
    for start in range(0, count, BLOCK):
        block = slice(start, start + BLOCK)
        assert np.abs(rounded.values - vector.values)[block].max() <= 0.3 * np.abs(values[block]).max()
    for part in (slice(0, cut * BLOCK), slice(cut * BLOCK, count)):
        start, stop = min(part.start, count), min(part.stop, count)
        message = codec.encode(rounded[start:stop], start, stop)
        assert len(message) == codec.size(stop - start, stop - start)
        assert same(codec.decode(message, stop - start, start, stop), rounded[start:stop])


def test_each_block_has_a_scale_and_zeros_stay_zeros():
    values = np.concatenate([np.full(BLOCK, 1e-20), np.zeros(BLOCK), np.full(BLOCK, 1e20)]).astype(np.float32)
    codec = WireCodec(np.dtype("float32"), "log4 blocks")
    rounded = codec.round(SparseVector(np.arange(len(values)), values)).values
    np.testing.assert_allclose(rounded, values, rtol=0.01)
    assert codec.size(64_000, 64_000) == 64_000 * 4.25 / 8


def test_a_block_with_a_sum_that_overflowed_is_infinite_also_at_its_readers():
    values = np.ones(2 * BLOCK, np.float32)
    values[3] = -np.inf
    codec = WireCodec(np.dtype("float32"), "log4 blocks")
    rounded = codec.round(SparseVector(np.arange(len(values)), values))
    read = codec.decode(codec.encode(rounded, 0, len(values)), len(values), 0, len(values))
    assert rounded.values.tolist() == read.values.tolist() == [np.inf] * BLOCK + [1.0] * BLOCK


@pytest.mark.parametrize(("density", "bits"), [(0.1, 5.5), (0.02, 7.7), (0.01, 8.7), (0.001, 12.1)])
def test_an_index_takes_about_two_bits_and_the_logarithm_of_the_gap(density, bits):
    count = 10_000
    size = WireCodec(np.dtype("float32")).size(count, int(count / density))
    assert bits - 0.6 <= 8 * size / count - 32 <= bits


@pytest.mark.parametrize(("density", "bits"), [(1, 0), (0.9, 1.12), (0.5, 2), (0.26, 3.85)])
def test_a_dense_part_takes_a_bit_for_each_of_its_region_and_a_whole_one_takes_none(density, bits):
    count = 32_000
    size = WireCodec(np.dtype("float32")).size(count, int(count / density))
    assert 8 * size / count - 32 == pytest.approx(bits, abs=0.01)


@given(st.integers(0, 3000), st.integers(0, 2**32))
def test_no_message_is_longer_than_with_plain_indices_nor_than_one_with_more_elements_but_for_all(count, span):
    codec = WireCodec(np.dtype("float32"))
    count = min(count, span)
    assert codec.size(count, span) <= 8 * count
    assert codec.size(count, span) <= codec.size(count + 1, max(span, count + 2))


def test_an_empty_message_is_an_empty_vector():
    codec = WireCodec(np.dtype("float64"))
    assert len(codec.encode(SparseVector.empty("float64"), 5, 5)) == 0
    assert len(codec.decode(np.empty(0, np.uint8), 0, 5, 5)) == 0


def message_of(indices, start, stop, kernels):
    indices = np.array(indices, np.int64)
    codec = WireCodec(np.dtype("float32"), kernels=kernels)
    return codec, codec.encode(SparseVector(indices, np.ones(len(indices), np.float32)), start, stop)


@pytest.mark.parametrize("kernels", EVERY_KERNELS.values(), ids=EVERY_KERNELS.keys())
class TestMalformed:
    """count, region and bytes must fit each other."""

    MANY = range(0, 4000, 100)  # in Elias-Fano code
    FEW = (3, 900)  # plain

    @pytest.mark.parametrize("indices", [MANY, FEW], ids=["coded", "plain"])
    @pytest.mark.parametrize("missing", [-4, 1, 3, 4, 7])
    def test_another_length_is_refused(self, indices, missing, kernels):
        codec, message = message_of(indices, 0, 4000, kernels)
        cut = message[:-missing] if missing > 0 else np.append(message, np.zeros(-missing, np.uint8))
        with pytest.raises(WireError, match=rf"has {len(message)} bytes; this one has {len(cut)}"):
            codec.decode(cut, len(indices), 0, 4000)

    @pytest.mark.parametrize(("indices", "start", "stop"), [
        ((5, 4), 0, 4000), ((4, 4), 0, 4000), ((5, -1), 0, 4000), ((4000, 3), 0, 4000),
        ((5, 3999), 0, 3999), ((99, 3999), 100, 4000)])
    def test_plain_indices_out_of_order_or_region_are_refused(self, indices, start, stop, kernels):
        codec, message = message_of(self.FEW, 0, 4000, kernels)
        message[8:].view(np.uint32)[:] = np.array(indices, np.int64).astype(np.uint32)
        with pytest.raises(WireError, match=rf"ascend within \[{start}, {stop}\)"):
            codec.decode(message, 2, start, stop)

    def test_coded_indices_beyond_the_region_are_refused(self, kernels):
        codec, message = message_of([*range(0, 3900, 100), 3999], 0, 4000, kernels)
        assert codec.size(40, 3999) == len(message)
        with pytest.raises(WireError, match=r"ascend within \[0, 3999\)"):
            codec.decode(message, 40, 0, 3999)

    @pytest.mark.parametrize("flips", [(0,), (0, 1)])
    def test_more_or_fewer_indices_than_announced_are_refused(self, flips, kernels):
        codec, message = message_of(self.MANY, 0, 4000, kernels)
        upper = message[-4 * (-(-(40 + (3999 >> 6)) // 32)):].view(np.uint32)  # 100 apart: 6 low bits
        for bit in flips:
            upper[0] ^= np.uint32(1 << bit)
        if len(flips) == 1:
            with pytest.raises(WireError, match="40 indices"):
                codec.decode(message, 40, 0, 4000)
        else:  # the first one's bit is elsewhere: 64 and 100
            assert codec.decode(message, 40, 0, 4000).indices[:2].tolist() == [64, 100]

    def test_equal_indices_are_refused(self, kernels):
        """Their upper parts may be equal; the lower ones must then ascend."""
        codec, message = message_of([*range(40)], 0, 4000, kernels)
        low = message[160:160 + 32]  # 40 times 6 bits
        low[:] = 0
        with pytest.raises(WireError, match="ascend"):
            codec.decode(message, 40, 0, 4000)

    @given(st.data())
    def test_whatever_bytes_come_nothing_but_a_lawful_vector_or_an_error_comes_out(self, kernels, data):
        start, stop, indices = data.draw(regions())
        codec, message = message_of(indices, start, stop, kernels)
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        if data.draw(st.booleans()):
            message[:] = rng.integers(0, 256, len(message))
        elif len(message):
            message[rng.integers(0, len(message), 3)] ^= np.uint8(1) << rng.integers(0, 8, 3).astype(np.uint8)
        try:
            decoded = codec.decode(message, len(indices), start, stop)
        except WireError:
            return
        assert len(decoded) == len(indices)
        assert (np.diff(decoded.indices) > 0).all()
        assert ((decoded.indices >= start) & (decoded.indices < stop)).all()


@pytest.mark.parametrize(("low_bits", "low_words"), [(-1, 4), (33, 40), (6, 1)])
def test_the_native_kernel_refuses_what_would_leave_its_arrays(low_bits, low_words):
    native = pytest.importorskip("horovod_oktopk.kernels._native")
    indices = np.arange(10, dtype=np.int64)
    with pytest.raises(ValueError, match="low bits"):
        native.pack_indices(indices, 0, low_bits, low_words, 4)
    with pytest.raises(ValueError, match="low bits"):
        native.unpack_indices(np.zeros(low_words + 4, np.uint32), 10, 0, 100, low_bits, low_words)
    with pytest.raises(ValueError, match="outside"):
        native.pack_indices(indices * 1000, 0, 0, 0, 4)
    with pytest.raises(ValueError, match="outside"):
        native.pack_indices(indices, 5, 2, 1, 4)
