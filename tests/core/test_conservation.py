"""What holds at every step, whatever the thresholds: nothing is lost, nothing counts twice, replicas agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .gradients import adversarial, cases
from .oracle import rank_order_sum
from .simulation import same_bits, same_runs, simulate

REUSE = {"threshold_interval": 4, "region_interval": 8}


def assert_conserved(record):
    """Each element is in the residual bit for bit, or zero there and part of u."""
    gone = np.setdiff1d(np.arange(len(record.acc)), record.contributed)
    assert same_bits(record.residual[gone], record.acc[gone])
    assert not record.residual[record.contributed].any()
    assert record.acc[record.contributed].all()
    assert np.isin(record.contributed, record.update.indices).all()


def assert_update_is_what_was_cleared(ranks):
    """u is the rank-order sum of exactly the contributions that left the residuals."""
    cleared = []
    for record in ranks:
        contribution = np.zeros_like(record.acc)
        contribution[record.contributed] = record.acc[record.contributed]
        cleared.append(contribution)
    update = ranks[0].update
    assert same_bits(np.unique(np.concatenate([record.contributed for record in ranks])), update.indices)
    assert same_bits(rank_order_sum(cleared)[update.indices], update.values)


def assert_replicas_agree(ranks):
    for record in ranks[1:]:
        assert same_bits(record.update.indices, ranks[0].update.indices)
        assert same_bits(record.update.values, ranks[0].update.values)


def assert_selection_is_lawful(ranks, k):
    for record in ranks:
        assert len(record.contributed) <= record.report.local_selected <= k
        assert record.report.global_selected == len(record.update)
        assert record.update.values.all()
        assert (np.diff(record.update.indices) > 0).all()
        assert (np.diff(record.contributed) > 0).all()


def assert_lawful(run, k):
    for ranks in run:
        for record in ranks:
            assert_conserved(record)
        assert_update_is_what_was_cleared(ranks)
        assert_replicas_agree(ranks)
        assert_selection_is_lawful(ranks, k)


@given(cases(), st.sampled_from([1.0, 2.0, 4.0, 1e9]))
@settings(deadline=None, max_examples=60)
def test_every_step_conserves_and_replicas_agree_while_thresholds_are_reused(case, balance_trigger):
    assert_lawful(simulate(case.gradients(), case.k, balance_trigger=balance_trigger, **REUSE), case.k)


@pytest.mark.parametrize("case", adversarial(), ids=lambda case: case.kind)
def test_every_step_conserves_wherever_the_top_k_lies(case):
    assert_lawful(simulate(case.gradients(), case.k, **REUSE), case.k)


@pytest.mark.parametrize("case", adversarial(n=900, k=60, size=5), ids=lambda case: case.kind)
def test_reuse_selects_within_the_guard(case):
    """Unless fewer non-zero elements exist; the first selection of all is exact."""
    for ranks in simulate(case.gradients(), case.k, threshold_guard=0.2, **REUSE):
        for record in ranks:
            assert 0.8 * case.k <= record.report.local_selected or (record.acc != 0).sum() < case.k
            assert record.report.global_selected <= 1.2 * case.k


def test_the_same_run_gives_the_same_bits_again():
    case = adversarial(n=900, k=60, size=6)[5]
    first, second = (simulate(case.gradients(), case.k, **REUSE) for _ in range(2))
    assert same_runs(first, second)
