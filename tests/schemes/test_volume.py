"""The promise of Equation 3, at every rank and every step: at most 6k(P-1)/P words of payload sent.

Where k' elements are kept of the sum, the promise is (2k + 4k')(P-1)/P words. It is held with an index in a word, as
the paper counts; what the code of indices saves comes on top of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.phases.volume import oktopk_bound
from horovod_oktopk.selection.sketches import sketch_shape

from ..support.gradients import Case, cases, cases_with_global_k, each_adversarial
from ..support.simulation import keeping, simulate
from .test_conservation import EXACT, REUSE

WORD = 4
GUARD = 0.25
MOST_ROUNDS = 16
"""Rounds of counting until the cuts are right: four that go by the samples, and halving of short intervals."""


def mean_bound(k, size, kept):
    """Return 2k(P-1)/P words for phase 1, and 4k'(P-1)/P for phase 2."""
    return 2 * k * (size - 1) / size + 4 * kept * (size - 1) / size


def sent_bound(k, size, kept):
    """Return the bound. If fewer than k are kept, phase 1 may be all that a rank has selected: more than the mean."""
    return mean_bound(k, size, kept) if kept >= k else max(mean_bound(k, size, kept), 2 * k + 2 * kept)


def received_bound(k, size, kept):
    """Return the bound. An owner gets all but its own of a region, balanced to 1/16 or reused within the
    same bound; then it gets u, of at most (1 + guard) k' elements."""
    return max(6 * k * (size - 1) / size - 2 * k, 2 * k) + 2 * (1 + GUARD) * kept + 2 * size


def agreement_bound(size):
    """Return words: the roll call and, if regions are cut anew, 64 quantiles, rounds of counting, and counts."""
    return (size - 1) * ((4 + size + 1) + 66 + (size + 1) + 4 * MOST_ROUNDS)


def global_select_bound(k, size):
    """Return words: sketches, magnitudes between two entries, a radix search (4 · 256 numbers), and counts.
    Where the threshold is reused, lengths, sizes and other sketches come before it."""
    entries, step = sketch_shape(k, size)
    return (size - 1) * (2 * 66 + entries + 1 + 4 * step + 4) + 4 * 2 * (2 * 256) * (size - 1) / size


pytestmark = pytest.mark.usefixtures("words_for_indices")


def sent_words(report, *phases):
    return sum(report.phases[name].bytes_sent for name in phases if name in report.phases) / WORD


def reports(run):
    return [record.report for ranks in run for record in ranks]


def assert_within_bounds(run, k, size, kept=None):
    kept = kept or k
    for report in reports(run):
        sent, received = report.payload_bytes()
        assert sent / WORD <= sent_bound(k, size, kept)
        assert received / WORD <= received_bound(k, size, kept)
        assert sent_words(report, "agree") <= agreement_bound(size)
        assert sent_words(report, "global_select") <= global_select_bound(kept, size)


@given(cases(dtypes=("float32",)), st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([EXACT, REUSE]),
       st.sampled_from([None, "log4"]))
def test_every_rank_keeps_to_the_bound_at_every_step(case, balance_trigger, options, value_dtype):
    run = simulate(case.gradients(), case.k, balance_trigger=balance_trigger, value_dtype=value_dtype, **options)
    assert_within_bounds(run, case.k, case.size)


@given(cases_with_global_k(dtypes=("float32",)), st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([EXACT, REUSE]))
def test_the_bound_holds_whatever_is_kept_of_the_sum(drawn, balance_trigger, options):
    case, kept = drawn
    make = keeping(kept, case, balance_trigger=balance_trigger, **options)
    run = simulate(case.gradients(), case.k, make=make)
    assert_within_bounds(run, case.k, case.size, kept)


@given(cases_with_global_k(dtypes=("float32",)), st.sampled_from([1.0, 4.0]))
def test_the_mean_rank_keeps_to_the_bound_of_the_paper_even_where_less_is_kept(drawn, balance_trigger):
    case, kept = drawn
    run = simulate(case.gradients(), case.k, make=keeping(kept, case, balance_trigger=balance_trigger, **EXACT))
    for ranks in run:
        sent = np.mean([record.report.payload_bytes()[0] / WORD for record in ranks])
        assert sent <= mean_bound(case.k, case.size, kept) * (1 + 1e-9)


@pytest.mark.parametrize("options", [EXACT, REUSE], ids=["exact", "reuse"])
@pytest.mark.parametrize("kept", [None, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (20, 320, 1280))])
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8))])
@pytest.mark.parametrize("case", each_adversarial())
def test_no_placement_of_the_top_k_breaks_the_bound_whatever_is_kept(case, size, kept, options):
    case = replace(case, size=size)
    if kept:
        kept = min(kept, size * case.k)
        options = {"make": keeping(kept, case, **options)}
    assert_within_bounds(simulate(case.gradients(), case.k, **options), case.k, size, kept)


def test_the_bound_is_that_of_table_1():
    for k, size, kept in ((10, 2, 10), (10, 8, 40), (10, 8, 1), (10, 2, 1), (7, 3, 7)):
        assert oktopk_bound(k, size, kept) == pytest.approx(sent_bound(k, size, kept))
    assert oktopk_bound(10, 4) == 6 * 10 * 3 / 4


def blocks(*placed, n=2000, size=2):
    """Return one step's gradients: (rank, start, length, value) blocks in zeros."""
    gradient = np.zeros((size, n), np.float32)
    for rank, start, length, value in placed:
        gradient[rank, start:start + length] = value
    return gradient


def test_regions_go_to_the_ranks_that_hold_them_already():
    """Otherwise both ranks would send all they selected, and the owner of the larger ones 4k words in all."""
    gradients = blocks((1, 0, 100, 20), (0, 1000, 100, 10))[None]
    run = simulate(gradients, 100)
    assert_within_bounds(run, 100, 2)
    assert [sent_words(record.report, "split_and_reduce") for record in run[0]] == [0, 0]


def test_a_reused_global_threshold_that_would_send_too_much_is_re_evaluated():
    """120 tied elements at one owner are within the guard of k = 100, but with the 40 that it has sent they
    would make 320 words of the 300 allowed."""
    first = blocks(*[(rank, start, 50, 10) for rank in (0, 1) for start in (0, 1000)])
    second = blocks((0, 100, 60, 20), (1, 200, 60, 20), (0, 1100, 40, 11), (1, 1200, 40, 11))
    run = simulate(np.stack([first, second]), 100, selection="reuse")
    assert_within_bounds(run, 100, 2)
    assert run[1][0].report.repartitioned is False
    assert sent_words(run[1][0].report, "split_and_reduce") == 2 * 40
    assert run[1][0].report.global_selected == 100


def test_a_reused_threshold_keeps_to_the_bound_of_what_is_kept_of_the_sum():
    """150 tied elements are within the guard of k' = 120; their owner has sent 25, so they would make 350 words of
    340."""
    first = blocks((0, 0, 30, 10), (0, 1000, 30, 10), (1, 100, 30, 10), (1, 1100, 30, 10))
    second = blocks((0, 200, 75, 20), (0, 1200, 25, 9), (1, 300, 75, 20), (1, 1300, 25, 9))
    run = simulate(np.stack([first, second]), 100, make=keeping(120, Case("blocks", 2000, 100, 2, 2, 0), **REUSE))
    assert_within_bounds(run, 100, 2, 120)
    assert run[1][0].report.repartitioned is False
    assert sent_words(run[1][0].report, "split_and_reduce") == 2 * 25
    assert 100 < run[1][0].report.global_selected <= 120


def test_agreement_costs_the_same_whatever_n_and_k():
    def words(n, k):
        gradients = np.random.default_rng(0).standard_normal((1, 4, n)).astype(np.float32)
        return [sent_words(report, "agree") for report in reports(simulate(gradients, k))]

    assert words(100, 10) == words(5000, 700)


def evolving(n, size, steps):
    """Return gradients as in training: a mean that drifts, noise on every rank, magnitudes of several orders."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.standard_normal(n)).astype(np.float32)
    mean = scale * rng.standard_normal(n, np.float32)
    gradients = np.empty((steps, size, n), np.float32)
    for step in gradients:
        mean = 0.9 * mean + 0.3 * scale * rng.standard_normal(n, np.float32)
        step[:] = mean + 0.7 * scale * rng.standard_normal((size, n), np.float32)
    return gradients


@pytest.fixture(scope="module")
def training():
    return simulate(evolving(200_000, 8, 20), 2000)


def test_training_keeps_to_the_bound_at_every_step_with_agreement_counted_too(training):
    assert_within_bounds(training, 2000, 8)
    assert all(report.bytes_sent / WORD <= sent_bound(2000, 8, 2000) for report in reports(training))


def test_the_report_tells_what_happened(training):
    first, later = training[0][0].report, training[8][0].report
    assert (first.step, first.n, first.k, first.repartitioned) == (1, 200_000, 2000, True)
    assert first.global_k == first.scalars()["oktopk/global_k"] == 2000
    assert (later.step, later.repartitioned, later.finite) == (9, False, True)
    assert later.bytes_sent > sum(later.payload_bytes()) / 2 > 0
    assert later.local_threshold > 0
    assert later.scalars()["oktopk/allgatherv/bytes_sent"] == later.phases["allgatherv"].bytes_sent
