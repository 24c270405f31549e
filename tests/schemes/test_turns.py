"""Turns of blocks: every block comes, and those in which more moves come more often."""

from __future__ import annotations

import json

import numpy as np
import pytest

from horovod_oktopk import OptionError
from horovod_oktopk.schemes.turns import Turns

COUNT = 50


def after(turns, steps, rates, each=10):
    """Take steps in which the blocks' elements move at these rates; return the turns, and how often each came."""
    came, piled_up = np.zeros(COUNT, int), np.zeros(COUNT)
    for _ in range(steps):
        piled_up += rates
        blocks = turns.next_blocks(each)
        turns = turns.after(blocks, piled_up[blocks].astype(np.float32))
        piled_up[blocks] = 0
        came[blocks] += 1
    return turns, came


def new():
    return Turns.new(COUNT)


def test_at_first_all_blocks_come_one_after_the_other():
    turns = new()
    for step in range(5):
        blocks = turns.next_blocks(10)
        assert blocks.tolist() == list(range(10 * step, 10 * step + 10))
        turns = turns.after(blocks, np.ones(10, np.float32))


def test_blocks_that_move_more_come_more_often_and_all_come():
    _, came = after(new(), 300, np.where(np.arange(COUNT) % 5, 1.0, 10.0))
    often, seldom = came[::5], came.reshape(-1, 5)[:, 1:]
    assert often.min() > 2 * seldom.max()
    assert seldom.min() > 30


@pytest.mark.parametrize("rate", [0.0, 1e-38, 1e30])
def test_all_come_in_turn_if_nothing_moves_or_all_moves_alike(rate):
    _, came = after(new(), 50, np.full(COUNT, rate))
    assert came.tolist() == [10] * COUNT


def test_a_block_that_has_rested_for_long_comes_though_its_rate_is_zero():
    turns, _ = after(new(), 100, np.arange(COUNT) > 0)
    _, came = after(turns, 100, np.ones(COUNT))
    assert came[0] >= 1


def test_equal_blocks_come_in_the_order_of_their_indices():
    turns = Turns(np.array([1, 2, 1, 2, 1], np.float32), np.ones(5, np.uint16))
    assert [turns.next_blocks(count).tolist() for count in (1, 2, 3, 5, 9)] == [
        [1], [1, 3], [0, 1, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_an_age_stays_at_its_largest_number():
    turns = Turns(np.ones(2, np.float32), np.array([65_534, 1], np.uint16))
    for age in (65_535, 65_535):
        turns = turns.after(np.array([1]), np.ones(1, np.float32))
        assert turns.ages.tolist() == [age, 1]


def test_a_record_is_text_and_has_all_of_it():
    turns, _ = after(new(), 7, np.arange(COUNT, dtype=float))
    again = Turns.from_record(json.loads(json.dumps(turns.record())))
    assert again.rates.tobytes() == turns.rates.tobytes()
    assert again.ages.tobytes() == turns.ages.tobytes()
    assert again.digest() == turns.digest() != new().digest()
    assert np.isinf(Turns.from_record(new().record()).rates).all()


@pytest.mark.parametrize("damage", [{"rates": "abc"}, {"rates": "?"}, {"ages": ""}, {"ages": None}])
def test_a_damaged_record_is_refused(damage):
    with pytest.raises(OptionError, match="the state is damaged: the turns"):
        Turns.from_record(new().record() | damage)


def test_a_move_that_float32_cannot_hold_does_not_pass_for_a_block_that_never_came():
    turns = new().after(np.arange(COUNT), np.full(COUNT, 1e300))
    assert np.isfinite(turns.rates).all()
