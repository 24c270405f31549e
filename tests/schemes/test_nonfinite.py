"""NaN or Inf on one rank: no rank counts the step, and the next goes on as if it had not been."""

from __future__ import annotations

import numpy as np
import pytest

from ..support.gradients import Case
from ..support.simulation import advance, new_ranks, same_bits, same_runs, simulate

CASE = Case("steady", 300, 30, 4, 6, seed=11)
OPTIONS = {"selection": "reuse", "threshold_interval": 8, "region_interval": 5}


def spoiled(gradient, value):
    """The other ranks' gradients are of another scale, so that their thresholds do not fit either."""
    bad = gradient[None] / 2
    bad[0, 2, 17] = value
    return bad


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_element_drops_the_step_on_all_ranks(value):
    ranks = new_ranks(CASE.size, CASE.n, **OPTIONS)
    before = advance(ranks, CASE.gradients()[:2], CASE.k)[-1]
    for old, record in zip(before, advance(ranks, spoiled(CASE.gradients()[2], value), CASE.k)[0], strict=True):
        assert record.update is None
        assert record.report.finite is False
        assert len(record.contributed) == 0
        assert same_bits(record.residual, old.residual)


@pytest.mark.parametrize("at", range(6))
def test_later_steps_have_the_bits_of_a_run_without_the_bad_step(at):
    gradients = CASE.gradients()
    ranks = new_ranks(CASE.size, CASE.n, **OPTIONS)
    before = advance(ranks, gradients[:at], CASE.k) if at else []
    advance(ranks, spoiled(gradients[at], np.nan), CASE.k)
    after = advance(ranks, gradients[at:], CASE.k)
    assert same_runs(before + after, simulate(gradients, CASE.k, **OPTIONS))


def test_a_bad_step_moves_no_payload():
    ranks = new_ranks(CASE.size, CASE.n, **OPTIONS)
    for record in advance(ranks, spoiled(CASE.gradients()[0], np.nan), CASE.k)[0]:
        assert record.report.payload_bytes() == (0, 0)
        assert record.report.phases["agree"].messages_sent == CASE.size - 1


@pytest.mark.parametrize("value_dtype", [None, "bfloat16", "log4"])
@pytest.mark.parametrize("global_density", [None, 1.0])
def test_a_sum_that_overflows_is_infinite_on_all_ranks_and_leaves_nothing_behind(value_dtype, global_density):
    ranks = new_ranks(CASE.size, CASE.n, value_dtype=value_dtype, global_density=global_density)
    gradient = CASE.gradients()[0]
    gradient[:, 17] = 3e38
    for record in advance(ranks, gradient[None], CASE.k)[0]:
        assert record.update.indices[np.isinf(record.update.values)].tolist() == [17]
        assert same_bits(record.update.values, ranks[0].records[0].update.values)
        assert np.isfinite(record.residual).all()
