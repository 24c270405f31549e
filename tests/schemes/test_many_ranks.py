"""On many ranks nobody is told what all others have: the same updates, and control that grows with P, not with P²."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk
from horovod_oktopk.phases import agreement
from horovod_oktopk.phases.volume import oktopk_bound

from ..support.gradients import Case, cases, each_adversarial
from ..support.schemes import EXACT, SCHEMES
from ..support.simulation import making, same_runs, simulate

MAKERS = {name: SCHEMES[name].algorithm for name in (*EXACT, "OkTopk, reused thresholds")} | {
    "often cut": OkTopk(region_interval=2).algorithm, "always balanced": making(balance_trigger=1.0)}
MANY = agreement.FEW_RANKS + 1
CONTROL = ("agree", "global_select")


def run(name, gradients, k):
    return simulate(gradients, k, make=MAKERS[name])


FEW_CASES = [pytest.param(Case("normal", 300, 20, size, 8, seed=3), id=f"{size} ranks") for size in (2, 3, 5)]


@pytest.mark.parametrize(("name", "case"), [
    pytest.param(name, *case.values, id=f"{name}, {case.id}", marks=case.marks) for name in MAKERS
    for case in FEW_CASES + (each_adversarial(steps=4) if name in ("OkTopk", "TopkDSA") else [])])
def test_what_ranks_are_told_changes_no_bit(name, case, monkeypatch):
    told_all = run(name, case.gradients(), case.k)
    monkeypatch.setattr(agreement, "FEW_RANKS", 1)
    assert same_runs(told_all, run(name, case.gradients(), case.k))


@pytest.mark.usefixtures("words_for_indices")
@given(case=cases(dtypes=("float32",)), trigger=st.sampled_from([1.0, 4.0]))
def test_the_bound_holds_from_three_ranks_on(case, trigger):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "FEW_RANKS", 1)
        for ranks in simulate(case.gradients(), case.k, balance_trigger=trigger, region_interval=4):
            for record in ranks:
                sent, received = (count / 4 for count in record.report.payload_bytes())
                if case.size > 2:
                    assert sent <= oktopk_bound(case.k, case.size)
                    assert received <= max(6 * case.k * (case.size - 1) / case.size, 4.5 * case.k) + 2 * case.size


@pytest.mark.parametrize("name", MAKERS)
def test_more_ranks_than_are_told_everything(name):
    gradients = Case("normal", 600, 30, MANY, 5, seed=3).gradients()
    first = run(name, gradients, 30)
    assert same_runs(first, run(name, gradients, 30))
    assert first[-1][0].report.step == 5


def control_words(size, k=512, steps=2):
    """Return the words that a rank sends for each of the others, in the step that cuts the regions, and the next."""
    gradients = np.random.default_rng(1).standard_normal((steps, size, 8 * k)).astype(np.float32)
    found = simulate(gradients, k)
    assert [step[0].report.repartitioned for step in found] == [True, False]
    return [max(sum(record.report.phases[name].bytes_sent for name in CONTROL) for record in step) / 4 / (size - 1)
            for step in found]


def test_control_grows_with_the_ranks_and_not_with_their_square():
    """A rank sends less to each other one if ranks are twice as many: they share the search for the threshold."""
    few, more = control_words(MANY), control_words(2 * MANY)
    assert more[1] <= few[1] <= 60
    assert more[0] <= few[0] <= 60 + 66 + 6 + 4 * 4


def test_on_few_ranks_no_round_of_messages_is_added():
    """One allgather is the roll call, two find the threshold."""
    report = simulate(Case("normal", 4000, 400, 8, 2, seed=1).gradients(), 400)[1][0].report
    assert not report.repartitioned
    assert report.phases["agree"].messages_sent == 7
    assert report.phases["global_select"].messages_sent == 2 * 7
