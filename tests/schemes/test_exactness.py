"""The result is u = Topk(Σ Topk(acc)), bit for bit, at every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk

from ..support.gradients import Case, cases, cases_with_global_k, each_adversarial
from ..support.oracle import oracle_run, rank_order_sum, topk_mask
from ..support.simulation import dense, keeping, same_bits, simulate

both_selections = pytest.mark.parametrize("selection", ["exact", "reuse"])


def assert_equals_oracle(case, global_k=None, **options):
    gradients = case.gradients()
    if global_k:
        options = {"make": keeping(global_k, case, **options)}
    run = simulate(gradients, case.k, **options)
    for ranks, (update, mask, residuals) in zip(run, oracle_run(gradients, case.k, global_k), strict=True):
        for rank, record in enumerate(ranks):
            assert same_bits(record.update.indices, np.flatnonzero(mask))
            assert same_bits(dense(record.update, case.n), update)
            assert same_bits(record.residual, residuals[rank])


@both_selections
@given(case=cases(steps=4))
def test_exact_steps_and_reuse_for_no_step_equal_the_dense_oracle_bit_for_bit(selection, case):
    assert_equals_oracle(case, region_interval=3, selection=selection, threshold_interval=1)


@given(cases_with_global_k(steps=4), st.sampled_from([1.0, 4.0]), st.sampled_from(["exact", "reuse"]))
def test_any_number_that_is_kept_of_the_sum_equals_the_dense_oracle(drawn, balance_trigger, selection):
    case, global_k = drawn
    assert_equals_oracle(case, global_k, region_interval=3, balance_trigger=balance_trigger, selection=selection,
                         threshold_interval=1)


@pytest.mark.parametrize("global_k", [None, 1, 40, 500, 800])
@pytest.mark.parametrize("case", each_adversarial(steps=4))
def test_steps_equal_the_oracle_wherever_the_top_k_lies_whatever_is_kept_of_the_sum(case, global_k):
    assert_equals_oracle(case, global_k)


@both_selections
def test_where_all_sums_are_kept_three_numbers_are_exchanged(selection):
    case = Case("normal", 300, 20, 4, 3, seed=2)
    for ranks in simulate(case.gradients(), case.k, make=keeping(80, case, selection=selection)):
        for record in ranks:
            traffic = record.report.phases["global_select"]
            assert (traffic.messages_sent, traffic.bytes_sent) == (3, 3 * 2 * 8)
            assert record.report.global_threshold == 0
            assert len(record.contributed) == record.report.local_selected == case.k


@pytest.mark.parametrize("global_density", [0.2, 1.0])
def test_elements_that_cancel_stay_in_the_residual_even_where_all_sums_are_kept(global_density):
    gradient = np.zeros((1, 2, 10), np.float32)
    gradient[0, :, 3] = 5, -5
    gradient[0, :, 7] = 1, 1
    for record in simulate(gradient, 2, make=OkTopk(density=0.2, global_density=global_density).algorithm)[0]:
        assert record.update.indices.tolist() == [7]
        assert abs(record.residual[3]) == 5


@both_selections
def test_where_fewer_sums_are_there_than_are_to_be_kept_all_are(selection):
    """All ranks select the same places: k sums in all, of 2k that may be kept."""
    case = Case("steady", 4000, 200, 4, 6, seed=4)
    for ranks in simulate(case.gradients(), case.k, make=keeping(400, case, selection=selection)):
        for record in ranks:
            assert len(record.contributed) == case.k
            assert record.report.global_selected < 400


@given(cases_with_global_k(steps=4))
def test_reuse_keeps_the_number_within_the_guard(drawn):
    case, global_k = drawn
    for ranks in simulate(case.gradients(), case.k, make=keeping(
            global_k, case, selection="reuse", threshold_interval=4)):
        sums = rank_order_sum([np.where(topk_mask(record.acc, case.k), record.acc, 0) for record in ranks])
        for record in ranks:
            least = min(global_k, np.count_nonzero(sums))
            assert least - max(0.25 * least, global_k / 16 + case.size) <= record.report.global_selected
            assert record.report.global_selected <= 1.25 * global_k


def test_a_sample_of_the_accumulator_is_enough_for_exactness():
    """Large enough that thresholds are estimated from every other element only."""
    assert_equals_oracle(Case("normal", 20_000, 1100, 3, 3, seed=5))


@pytest.mark.parametrize(("n", "size"), [(1, 1), (1, 4), (3, 9)])
def test_more_ranks_than_elements(n, size):
    assert_equals_oracle(Case("ties", n, n, size, 4, seed=1))


def test_zero_gradients_give_an_empty_update():
    run = simulate(np.zeros((3, 4, 20), np.float32), 5)
    assert all(len(record.update) == 0 and not record.residual.any() for ranks in run for record in ranks)


@both_selections
def test_at_density_1_nothing_stays_behind(selection):
    gradients = np.random.default_rng(1).integers(-999, 1000, (6, 3, 50)).astype(np.float32)
    for step, ranks in zip(gradients, simulate(gradients, 50, selection=selection), strict=True):
        for record in ranks:
            assert same_bits(dense(record.update, 50), step.sum(axis=0))
            assert not record.residual[record.update.indices].any()


def test_the_oracle_breaks_ties_by_index_and_leaves_zeros_out():
    assert topk_mask(np.array([1, -2, 0, 2, -1.0]), 3).tolist() == [True, True, False, True, False]
    assert topk_mask(np.array([0, 0, 3.0]), 3).tolist() == [False, False, True]
