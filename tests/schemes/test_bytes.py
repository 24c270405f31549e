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
