"""Memory: a resumed run has the bits of one that never stopped; `forgotten` drops what may be stale."""

from __future__ import annotations

import json

import numpy as np
import pytest

from horovod_oktopk.schemes.algorithm import Memory

from ..support.gradients import Case
from ..support.schemes import SCHEMES
from ..support.simulation import advance, keeping, making, new_ranks, same_runs, simulate
from .test_conservation import assert_lawful

CASE, NORMAL = (Case(kind, 400, 30, 5, 10, seed=8) for kind in ("steady", "normal"))
OPTIONS = {"selection": "reuse", "threshold_interval": 4, "region_interval": 7}


@pytest.mark.parametrize(("case", "make", "stop"), [
    *((CASE, making(**OPTIONS), stop) for stop in range(10)),
    *((NORMAL, keeping(global_k, CASE, **OPTIONS), 5) for global_k in (20, 60, 150)),
    *((NORMAL, options.algorithm, 4) for options in SCHEMES.values())])
def test_a_resumed_run_has_the_same_bits(case, make, stop):
    """By new objects, from what a checkpoint holds: the state as text, and the residual."""
    gradients = case.gradients()
    ranks, resumed = (new_ranks(case.size, case.n, make=make) for _ in range(2))
    before = advance(ranks, gradients[:stop], case.k) if stop else []
    for old, new in zip(ranks, resumed, strict=True):
        new.memory = Memory.from_record(json.loads(json.dumps(old.memory.record())))
        new.accumulator.load_residual(old.accumulator.read_residual())
    found, expected = before + advance(resumed, gradients[stop:], case.k), simulate(gradients, case.k, make=make)
    assert same_runs(found, expected)
    for step, (ranks, others) in enumerate(zip(found, expected, strict=True), start=1):
        assert ranks[0].report.step == others[0].report.step == step
        assert ranks[0].report.repartitioned == others[0].report.repartitioned


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
        ranks[rank].memory = ranks[rank].memory.forgotten()
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
