"""Bytes that a step sends: fewer than the 2k words that COO takes for one way alone."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk.schemes.gtopk import PaddedCodec
from horovod_oktopk.vectors.sparse import SparseVector
from horovod_oktopk.vectors.wire import WireCodec

from ..support.simulation import simulate
from .test_volume import evolving

N, K, SIZE, STEPS = 400_000, 4000, 8, 12


def words(run, k):
    """Return the mean payload of a rank in a step, in units of k(P-1)/P words."""
    sent = [record.report.payload_bytes()[0] for ranks in run for record in ranks]
    return np.mean(sent) / 4 / (k * (SIZE - 1) / SIZE)


@pytest.mark.parametrize(("value_dtype", "bound"), [(None, 2.6), ("bfloat16", 1.6), ("log4", 0.85)])
def test_indices_cost_a_byte_and_values_what_their_dtype_takes(value_dtype, bound):
    run = simulate(evolving(N, SIZE, STEPS), K, value_dtype=value_dtype)
    assert bound - 0.5 < words(run, K) <= bound
    reports = [record.report for ranks in run for record in ranks]
    assert {(report.local_selected, report.global_selected) for report in reports} == {(K, K)}


@pytest.mark.parametrize(("value_dtype", "bits"), [(None, 32), ("log4", 4)])
def test_where_everything_is_sent_no_index_is(value_dtype, bits):
    n, size = 6400, 4
    gradients = np.random.default_rng(0).standard_normal((5, size, n)).astype(np.float32)
    if value_dtype:  # then sums that are zero are sent as well
        gradients[:, 1], gradients[:, 3] = -gradients[:, 0], -gradients[:, 2]
    for ranks in simulate(gradients, n, value_dtype=value_dtype):
        there_and_back = 2 * n * (size - 1) / size * bits / 8
        sent = [record.report.payload_bytes()[0] for record in ranks]
        assert sent == pytest.approx([there_and_back] * size, rel=0.01)
        assert len(ranks[0].update) == n


@pytest.mark.parametrize("value_dtype", [None, "log4"])
def test_a_message_of_the_tree_holds_any_number_of_elements(value_dtype):
    """Also one fewer than all, which takes longer than all."""
    n = 200
    codec = PaddedCodec(WireCodec(np.dtype("float32"), value_dtype, ends=(1.0, 1.0)), n, n)
    for count in range(n + 1):
        message = codec.encode(SparseVector(np.arange(count) + (count < n), np.ones(count, np.float32)))
        assert len(message) == codec.size
        assert len(codec.decode(message)) == count
