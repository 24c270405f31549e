"""The result is u = Topk(Σ Topk(acc)), bit for bit, at every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from ..support.gradients import Case, adversarial, cases
from ..support.oracle import oracle_run, topk_mask
from ..support.simulation import dense, same_bits, simulate


def assert_equals_oracle(case, **options):
    gradients = case.gradients()
    run = simulate(gradients, case.k, **options)
    for ranks, (update, mask, residuals) in zip(run, oracle_run(gradients, case.k), strict=True):
        for rank, record in enumerate(ranks):
            assert same_bits(record.update.indices, np.flatnonzero(mask))
            assert same_bits(dense(record.update, case.n), update)
            assert same_bits(record.residual, residuals[rank])


@given(cases(steps=4))
def test_exact_steps_equal_the_dense_oracle_bit_for_bit(case):
    assert_equals_oracle(case, region_interval=3)


@pytest.mark.parametrize("case", adversarial(steps=4), ids=lambda case: case.kind)
def test_exact_steps_equal_the_oracle_wherever_the_top_k_lies(case):
    assert_equals_oracle(case)


@given(cases(steps=4))
def test_reuse_for_no_step_is_exact_too(case):
    assert_equals_oracle(case, selection="reuse", threshold_interval=1)


@pytest.mark.parametrize("messages_in_flight", [1, 2, 100])
def test_messages_in_flight_change_no_bit(messages_in_flight):
    assert_equals_oracle(Case("normal", 500, 40, 7, 3, seed=3), messages_in_flight=messages_in_flight)


def test_a_sample_of_the_accumulator_is_enough_for_exactness():
    """Large enough that thresholds are estimated from every other element only."""
    assert_equals_oracle(Case("normal", 20_000, 1100, 3, 3, seed=5))


@pytest.mark.parametrize(("n", "size"), [(1, 1), (1, 4), (3, 9)])
def test_more_ranks_than_elements(n, size):
    assert_equals_oracle(Case("ties", n, n, size, 4, seed=1))


def test_zero_gradients_give_an_empty_update():
    run = simulate(np.zeros((3, 4, 20), np.float32), 5)
    assert all(len(record.update) == 0 and not record.residual.any() for ranks in run for record in ranks)


@pytest.mark.parametrize("selection", ["exact", "reuse"])
def test_at_density_1_nothing_stays_behind(selection):
    gradients = np.random.default_rng(1).integers(-999, 1000, (6, 3, 50)).astype(np.float32)
    for step, ranks in zip(gradients, simulate(gradients, 50, selection=selection), strict=True):
        for record in ranks:
            assert same_bits(dense(record.update, 50), step.sum(axis=0))
            assert not record.residual[record.update.indices].any()


def test_elements_that_cancel_stay_in_the_residual():
    gradient = np.zeros((1, 2, 10), np.float32)
    gradient[0, :, 3] = 5, -5
    gradient[0, :, 7] = 1, 1
    for record in simulate(gradient, 2)[0]:
        assert record.update.indices.tolist() == [7]
        assert abs(record.residual[3]) == 5


def test_the_oracle_breaks_ties_by_index_and_leaves_zeros_out():
    assert topk_mask(np.array([1, -2, 0, 2, -1.0]), 3).tolist() == [True, True, False, True, False]
    assert topk_mask(np.array([0, 0, 3.0]), 3).tolist() == [False, False, True]
