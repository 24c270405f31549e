"""Bytes that a step sends: fewer than the 2k words that COO takes for one way alone."""

from __future__ import annotations

import numpy as np
import pytest

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
    gradients[:, 1] = -gradients[:, 0]  # sums that are zero are sent as well
    gradients[:, 3] = -gradients[:, 2]
    for ranks in simulate(gradients, n, value_dtype=value_dtype):
        there_and_back = 2 * n * (size - 1) / size * bits / 8
        sent = [record.report.payload_bytes()[0] for record in ranks]
        assert sent == pytest.approx([there_and_back] * size, rel=0.01)
        assert len(ranks[0].update) == n
