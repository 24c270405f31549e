"""Sparse vectors as bytes: what comes back is what went in, and what is malformed is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.core.sparse import SparseVector
from horovod_oktopk.core.wire import decode, element_bytes, encode
from horovod_oktopk.errors import WireError


@st.composite
def vectors(draw):
    dtype = draw(st.sampled_from(["float32", "float64"]))
    indices = sorted(draw(st.sets(st.integers(0, 2**32 - 1), max_size=30)))
    width = 32 if dtype == "float32" else 64
    values = draw(st.lists(st.floats(width=width), min_size=len(indices), max_size=len(indices)))
    return SparseVector(np.array(indices, np.int64), np.array(values, dtype))


def message(indices, dtype="float32"):
    return encode(SparseVector(np.array(indices, np.int64), np.arange(len(indices)).astype(dtype)))


@given(vectors())
def test_a_message_holds_the_vector_bit_for_bit(vector):
    encoded = encode(vector)
    assert encoded.dtype == np.uint8
    assert len(encoded) == len(vector) * element_bytes(vector.values.dtype)
    decoded = decode(encoded, vector.values.dtype, 0, 2**32)
    assert decoded.indices.tolist() == vector.indices.tolist()
    assert decoded.values.tobytes() == vector.values.tobytes()


def test_an_element_is_an_index_word_and_its_value():
    assert (element_bytes(np.float32), element_bytes("float64")) == (8, 12)


@pytest.mark.parametrize("missing", [1, 3, 4, 7])
def test_a_truncated_message_is_refused(missing):
    with pytest.raises(WireError, match=f"{24 - missing} bytes"):
        decode(message([1, 2, 3])[:-missing], np.float32, 0, 10)


@pytest.mark.parametrize("indices", [[5, 4], [4, 4], [1, 3, 2, 9]])
def test_indices_out_of_order_are_refused(indices):
    with pytest.raises(WireError, match="ascend"):
        decode(message(indices), np.float32, 0, 10)


@pytest.mark.parametrize("indices", [[1, 5], [3, 10], [10], [1]])
def test_indices_out_of_the_region_are_refused(indices):
    with pytest.raises(WireError, match=r"\[2, 10\)"):
        decode(message(indices), np.float32, 2, 10)


def test_the_ends_of_a_region_are_inside_and_outside():
    assert decode(message([2, 9]), np.float32, 2, 10).indices.tolist() == [2, 9]


def test_an_empty_message_is_an_empty_vector():
    assert len(decode(np.empty(0, np.uint8), np.float64, 5, 5)) == 0
