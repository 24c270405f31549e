"""Invariants of every step, whatever the thresholds: nothing is lost, nothing counts twice, replicas agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.kernels import KERNELS

from ..support.gradients import Case, cases, cases_with_global_k, each_adversarial
from ..support.oracle import rank_order_sum
from ..support.simulation import keeping, same_bits, simulate

EXACT = {"region_interval": 8}
REUSE = {"selection": "reuse", "threshold_interval": 4, "region_interval": 8}
SELECTIONS = {"exact": EXACT, "reuse": REUSE}


def assert_kept(record):
    """Assert that the residual is what was not contributed, bit for bit, and nothing else."""
    kept = np.setdiff1d(np.arange(len(record.acc)), record.contributed)
    assert same_bits(record.residual[kept], record.acc[kept])
    assert not record.residual[record.contributed].any()


def assert_conserved(record):
    """Assert that each element is in the residual bit for bit, or zero there and part of u."""
    assert_kept(record)
    assert record.acc[record.contributed].all()
    assert np.isin(record.contributed, record.update.indices).all()


def assert_update_is_what_was_cleared(ranks):
    """Assert that u is the rank-order sum of exactly the contributions that left the residuals."""
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


@given(cases(), st.sampled_from([1.0, 2.0, 4.0, 1e9]), st.sampled_from([*SELECTIONS]))
def test_every_step_conserves_and_replicas_agree(case, balance_trigger, selection):
    options = SELECTIONS[selection]
    assert_lawful(simulate(case.gradients(), case.k, balance_trigger=balance_trigger, **options), case.k)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("case", each_adversarial())
def test_every_step_conserves_wherever_the_top_k_lies(case, selection):
    assert_lawful(simulate(case.gradients(), case.k, **SELECTIONS[selection]), case.k)


@given(cases_with_global_k(), st.sampled_from([1.0, 4.0, 1e9]), st.sampled_from([*SELECTIONS]))
def test_every_step_conserves_whatever_is_kept_of_the_sum(drawn, balance_trigger, selection):
    case, global_k = drawn
    make = keeping(global_k, case, balance_trigger=balance_trigger, **SELECTIONS[selection])
    run = simulate(case.gradients(), case.k, make=make)
    assert_lawful(run, case.k)
    assert {record.report.global_k for ranks in run for record in ranks} == {global_k}


@pytest.mark.parametrize(("selection", "guard"), [("exact", 0), ("reuse", 0.25)])
@pytest.mark.parametrize("case", each_adversarial(n=900, k=60, size=5))
def test_exact_selection_selects_k_at_every_step_and_reuse_within_the_guard(case, selection, guard):
    """Selection counts among the elements that there are."""
    for ranks in simulate(case.gradients(), case.k, **SELECTIONS[selection]):
        reduced = len(np.unique(np.concatenate([record.contributed for record in ranks])))
        for record in ranks:
            assert record.report.local_selected == min(case.k, (record.acc != 0).sum())
            least, most = (1 - guard) * min(case.k, reduced), (1 + guard) * case.k
            assert least <= record.report.global_selected <= most


def coarse(steps, size, n, seed=0):
    """Return gradients of 16 significant bits and few exponents: float32 adds many of them without rounding."""
    rng = np.random.default_rng(seed)
    gradients = rng.integers(-2**15, 2**15, (steps, size, n)) * (rng.random((steps, size, n)) < 0.3)
    gradients[..., rng.integers(0, n, n // 10)] *= 4
    return gradients.astype(np.float32) / 2**12


@pytest.mark.parametrize("global_k", [25, 40, 80])
@pytest.mark.parametrize("value_dtype", ["bfloat16", "log4"])
@pytest.mark.parametrize("balance_trigger", [1.0, 1e9])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_with_rounded_values_nothing_is_lost_either(value_dtype, balance_trigger, size, global_k):
    gradients = coarse(5, size, 700)
    make = keeping(global_k, Case("coarse", 700, 40, size, 5, seed=0), value_dtype=value_dtype,
                   balance_trigger=balance_trigger, region_interval=3)
    run = simulate(gradients, 40, make=make)
    rounded = 0
    for ranks in run:
        assert_replicas_agree(ranks)
        update = ranks[0].update
        before = np.sum([record.acc.astype(np.float64) for record in ranks], axis=0)
        after = np.sum([record.residual.astype(np.float64) for record in ranks], axis=0)
        after[update.indices] += update.values
        assert (before == after).all()
        assert len(update) == ranks[0].report.global_k or len(update) < global_k == 80
        for record in ranks:
            untouched = np.setdiff1d(np.arange(700), update.indices)
            assert same_bits(record.residual[untouched], record.acc[untouched])
            rounded += np.count_nonzero(record.residual[record.contributed])
    assert rounded > 50


@pytest.mark.parametrize("k", [2, 6])
def test_sums_that_nearly_cancel_are_rounded_without_loss(k):
    """All sums are smaller than what any rank has selected: the largest of them ends the levels, not a threshold."""
    gradients = np.zeros((1, 2, 40), np.float32)
    places, noise = np.arange(0, 36, 36 // k)[:k], np.linspace(0.9, 1.1, k).astype(np.float32)
    gradients[0, 0, places], gradients[0, 1, places] = noise, -0.8 * noise
    make = keeping(40, Case("cancel", 40, k, 2, 1, seed=0), value_dtype="log4")
    [ranks] = simulate(gradients, k, make=make)
    update, expected = ranks[0].update, gradients[0].sum(axis=0, dtype=np.float64)
    residuals = np.sum([record.residual.astype(np.float64) for record in ranks], axis=0)
    residuals[update.indices] += update.values
    assert np.allclose(residuals, expected, atol=1e-6)
    assert np.abs(update.values).max() <= 1.02 * np.abs(expected).max()


def test_values_in_16_bits_are_what_every_rank_applies():
    for ranks in simulate(coarse(3, 3, 500), 30, value_dtype="bfloat16"):
        values = ranks[0].update.values
        assert values.dtype == np.float32
        assert same_bits(KERNELS.from_half(KERNELS.to_half(values), np.float32), values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{"balance_trigger": 1.0}, REUSE], ids=["exact", "reuse"])
def test_values_in_4_bits_are_what_every_rank_applies(options, dtype):
    """At most eight magnitudes, all of them bfloat16, on all ranks; the owners' remainders with them are the sums."""
    balanced = False
    for ranks in simulate(coarse(6, 3, 500).astype(dtype), 30, value_dtype="log4", **options):
        assert_replicas_agree(ranks)
        values = ranks[0].update.values
        assert values.dtype == dtype
        assert same_bits(KERNELS.from_half(KERNELS.to_half(values), dtype), values)
        assert len(np.unique(np.abs(values))) <= 8
        balanced |= ranks[0].report.balanced
    assert balanced or "balance_trigger" not in options


@pytest.mark.parametrize("k", [20, 60])
def test_what_4_bits_leave_over_follows_in_the_next_steps(k):
    """All of the sum; with k = n no threshold says how small what is sent may be."""
    gradients = np.zeros((60, 3, 60))
    gradients[0] = np.random.default_rng(0).standard_normal((3, 60)) * 10.0 ** np.arange(-3, 3).repeat(10)
    applied = np.zeros(60)
    for ranks in simulate(gradients, k, value_dtype="log4"):
        applied[ranks[0].update.indices] += ranks[0].update.values
    assert np.allclose(applied, gradients[0].sum(axis=0), rtol=1e-9, atol=1e-12)


def test_one_element_a_thousand_times_as_large_starves_nobody_nor_itself():
    gradients = np.random.default_rng(0).standard_normal((60, 3, 500)).astype(np.float32) + 3
    gradients[:, :, 7] *= 1000
    run, plain = (simulate(gradients, 50, value_dtype=value_dtype) for value_dtype in ("log4", None))
    largest = max(np.abs(record.residual[7]) for record in run[-1])
    assert largest < np.abs(gradients[-1, :, 7]).max() / 50
    waiting, usual = (np.mean([np.abs(record.residual).mean() for record in of[-1]]) for of in (run, plain))
    assert waiting < 1.5 * usual
