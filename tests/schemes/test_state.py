"""state and load_state: a resumed run has the bits of one that never stopped; forget drops what may be stale."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ..support.gradients import Case
from ..support.simulation import advance, keeping, new_ranks, same_runs, simulate
from .test_conservation import assert_lawful

CASE = Case("steady", 400, 30, 5, 10, seed=8)
OPTIONS = {"selection": "reuse", "threshold_interval": 4, "region_interval": 7}


def resumed(ranks, **options):
    """New objects from what a checkpoint holds: the state as text, and the residual."""
    fresh = new_ranks(len(ranks), CASE.n, **(options or OPTIONS))
    for old, new in zip(ranks, fresh, strict=True):
        new.scheme.load_state(json.loads(json.dumps(old.scheme.state())))
        new.accumulator.residual[:] = old.accumulator.residual
    return fresh


@pytest.mark.parametrize("stop", range(10))
def test_a_resumed_run_has_the_same_bits(stop):
    gradients = CASE.gradients()
    ranks = new_ranks(CASE.size, CASE.n, **OPTIONS)
    before = advance(ranks, gradients[:stop], CASE.k) if stop else []
    after = advance(resumed(ranks), gradients[stop:], CASE.k)
    assert same_runs(before + after, simulate(gradients, CASE.k, **OPTIONS))
    assert after[-1][0].report.step == 10


@pytest.mark.parametrize("global_k", [20, 60, 150])
def test_a_resumed_run_has_the_same_bits_whatever_it_keeps_of_the_sum(global_k):
    gradients = Case("normal", CASE.n, CASE.k, CASE.size, CASE.steps, seed=8).gradients()
    make = keeping(global_k, CASE, **OPTIONS)
    ranks = new_ranks(CASE.size, CASE.n, make=make)
    before = advance(ranks, gradients[:5], CASE.k)
    after = advance(resumed(ranks, make=make), gradients[5:], CASE.k)
    assert same_runs(before + after, simulate(gradients, CASE.k, make=make))
    assert not after[0][0].report.repartitioned


def test_the_run_that_is_resumed_reuses_its_thresholds():
    """Otherwise the equal bits could come from re-evaluating at every step."""
    run = simulate(CASE.gradients(), CASE.k, **OPTIONS)
    asked_once = [ranks[0].report.phases["global_select"].messages_sent == CASE.size - 1 for ranks in run]
    assert sum(asked_once) >= 5


@pytest.mark.parametrize("forgetful", [[0], [3], [0, 1, 2, 3, 4]])
def test_ranks_that_forget_are_re_evaluated_with_all_others(forgetful):
    ranks = new_ranks(CASE.size, CASE.n, **OPTIONS)
    advance(ranks, CASE.gradients()[:5], CASE.k)
    for rank in forgetful:
        ranks[rank].scheme.forget()
    run = advance(ranks, CASE.gradients()[5:], CASE.k)
    assert_lawful(run, CASE.k)
    assert all(record.report.repartitioned and record.report.global_selected == CASE.k for record in run[0])


@pytest.mark.parametrize("size", [2, 7])
def test_another_number_of_ranks_goes_on(size):
    ranks = new_ranks(CASE.size, CASE.n, **OPTIONS)
    advance(ranks, CASE.gradients()[:3], CASE.k)
    survivors = (ranks + new_ranks(2, CASE.n, **OPTIONS))[:size]
    gradients = np.concatenate([CASE.gradients(), CASE.gradients()], axis=1)[3:, :size]
    run = advance(survivors, gradients, CASE.k)
    assert_lawful(run, CASE.k)
    assert run[0][0].report.step == 4
