"""NaN or Inf on one rank: no rank counts the step, and the next goes on as if it had not been."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk import OkTopk

from ..support.gradients import Case
from ..support.schemes import SCHEMES
from ..support.simulation import advance, new_ranks, same_bits, same_runs, simulate

CASE = Case("steady", 300, 30, 4, 6, seed=11)
OPTIONS = {**SCHEMES, "reuse": OkTopk(density=0.1, selection="reuse", threshold_interval=8, region_interval=5)}


def spoiled(gradient, value):
    """Return halved gradients, which no threshold of the step before fits, with one value spoiled."""
    bad = gradient[None] / 2
    bad[0, 2, 17] = value
    return bad


@pytest.mark.parametrize(("name", "at"), [
    *((name, 2) for name in OPTIONS), *(("reuse", at) for at in (0, 1, 3, 4, 5))])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_step_is_dropped_on_all_ranks_and_leaves_no_trace_in_later_ones(name, at, value):
    gradients, make = CASE.gradients(), OPTIONS[name].algorithm
    ranks = new_ranks(CASE.size, CASE.n, make=make)
    before = advance(ranks, gradients[:at], CASE.k) if at else []
    residuals = [rank.accumulator.read_residual() for rank in ranks]
    for residual, record in zip(residuals, advance(ranks, spoiled(gradients[at], value), CASE.k)[0], strict=True):
        assert record.update is None
        assert record.report.finite is False
        assert len(record.contributed) == 0
        assert same_bits(record.residual, residual)
        assert record.report.payload_bytes() == (0, 0)
        assert record.report.phases["agree"].messages_sent == CASE.size - 1
    after = advance(ranks, gradients[at:], CASE.k)
    assert same_runs(before + after, simulate(gradients, CASE.k, make=make))


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
