"""Each host is one worker: what schemes promise that go by more than a share, as one rank for each host does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_oktopk import GaussianK, GTopk, OkTopk, timing
from horovod_oktopk.schemes import auto, gaussiank
from horovod_oktopk.schemes.algorithm import Step
from horovod_oktopk.schemes.auto import TRIAL, Strategy, dense_seconds
from horovod_oktopk.schemes.cost import gtopk_volume, oktopk_bound, topka_volume
from horovod_oktopk.schemes.gtopk import tree_distances
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import on_hosts
from horovod_oktopk.transport.local import run_ranks

from ..support.gradients import Case, cases, each_adversarial
from ..support.simulation import Record, advance, making, new_ranks, same_bits
from .test_auto import taking
from .test_conservation import assert_conserved, assert_lawful, assert_update_is_what_was_cleared
from .test_hosts import assert_same_as_flat, assert_same_update, assert_same_updates, on_shares

REUSE = {"selection": "reuse", "threshold_interval": 4, "region_interval": 8}


def records(gradients, found):
    """What `on_shares` gave, as the records that as many ranks as hosts would have: [step][host]."""
    _, size, n = gradients.shape
    before, run = np.zeros((size, n), gradients.dtype), []
    for gradient, ranks in zip(gradients, found, strict=True):
        each = len(ranks) // size
        run.append([_record(before[host] + gradient[host], ranks[host * each:][:each]) for host in range(size)])
        before = np.stack([record.residual for record in run[-1]])
    return run


def _record(acc, ranks):
    """Of a host, from (update, residual, report) of its ranks."""
    residual = np.concatenate([residual for _, residual, _ in ranks])
    update, _, report = ranks[0]
    selected = sum(report.local_selected for _, _, report in ranks)
    return Record(acc, residual, update, np.flatnonzero((residual == 0) & (acc != 0)),
                  replace(report, local_selected=selected))


def assert_ranks_agree(found):
    for ranks in found:
        for update, *_ in ranks[1:]:
            assert_same_update(update, ranks[0][0])


def host_words(ranks, ranks_per_host):
    """Words of payload (sent, received) by all ranks of each host: shape (H, 2)."""
    words = np.array([report.payload_bytes() for _, _, report in ranks]) / 4
    return words.reshape(-1, ranks_per_host, 2).sum(axis=1)


def stationary(hosts, totals=(300, 360, 260, 330, 290), n=6000):
    """So many sums are large at a step, 240 of them on all hosts: one threshold serves all steps."""
    rng = np.random.default_rng(0)
    gradients = 0.01 * rng.standard_normal((len(totals), hosts, n))
    for gradient, large in zip(gradients, totals, strict=True):
        places = rng.choice(n, large, replace=False)
        gradient[:, places[:240]] = rng.uniform(10, 20, (hosts, 240))
        gradient[np.arange(large - 240) % hosts, places[240:]] = hosts * rng.uniform(10, 20, large - 240)
    return gradients.astype(np.float32)


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (3, 2), (5, 3), (4, 1)])
def test_a_reused_threshold_selects_the_same_bits(hosts, ranks_per_host):
    """Where it is within the guard, that is: what sketches take instead depends on who owns what."""
    gradients, make = stationary(hosts), OkTopk(selection="reuse").build
    assert_same_as_flat(gradients, 300, ranks_per_host, make)
    found = [ranks[0][2] for ranks in on_shares(gradients, 300, ranks_per_host, make)]
    assert len({report.global_threshold for report in found}) == 1
    assert max(report.global_selected for report in found) > 350
    assert min(report.global_selected for report in found) < 270


@given(case=cases(), ranks_per_host=st.integers(1, 4))
def test_with_reused_thresholds_every_step_conserves_and_all_ranks_agree(case, ranks_per_host):
    k = min(case.k, case.n)
    found = on_shares(case.gradients(), k, ranks_per_host, OkTopk(**REUSE).build)
    assert_ranks_agree(found)
    assert_lawful(records(case.gradients(), found), k)


@pytest.mark.parametrize("case", each_adversarial(n=900, k=60, size=5))
def test_reuse_selects_within_the_guard(case):
    """Of the elements that there are."""
    found = on_shares(case.gradients(), case.k, 2, OkTopk(**REUSE).build)
    for ranks in records(case.gradients(), found):
        reduced = len(np.unique(np.concatenate([record.contributed for record in ranks])))
        for record in ranks:
            assert record.report.local_selected == min(case.k, (record.acc != 0).sum())
            assert 0.75 * min(case.k, reduced) <= record.report.global_selected <= 1.25 * case.k


def much_at_one_host():
    """Of three hosts. In the second step a reused threshold would select 1.25 k sums. The first host has sent all k
    elements, and the next one owns none of the sums."""
    gradients = np.zeros((2, 3, 2, 1200), np.float32)
    gradients[0, :, :, ::30] = 10
    second, (own, middle, last) = gradients[1], [slice(start, start + 380) for start in (10, 410, 810)]
    for share in range(2):
        for host in (1, 2):
            second[host, share, own][20 * host:20 * host + 20] = 40
            second[host, share, middle][20 * host:20 * host + 20] = 20
        second[0, share, middle][80:100] = 20
        second[0, share, last][20:30] = 40
        second[0, share, last][40:50] = 20
    return gradients.reshape(2, 3, 2400)


@pytest.mark.usefixtures("words_for_indices")
def test_a_reused_threshold_that_would_have_a_host_send_too_much_is_replaced():
    k, make = 80, OkTopk(selection="reuse").build
    first, second = on_shares(much_at_one_host(), k, 2, make)
    assert not any(report.repartitioned for _, _, report in second)
    assert host_words(second, 2)[0, 0] > 2 * k  # phase 1 alone
    assert host_words(second, 2)[:, 0].max() <= oktopk_bound(k, 3)
    assert second[0][2].global_selected == k


@pytest.mark.usefixtures("words_for_indices")
@pytest.mark.parametrize("options", [{"region_interval": 8}, REUSE], ids=["exact", "reuse"])
@given(case=cases(dtypes=("float32",)), ranks_per_host=st.integers(1, 4), trigger=st.sampled_from([1.0, 4.0, 1e9]))
@example(case=Case("cluster_per_rank", 3, 1, 5, 10, seed=0), ranks_per_host=2, trigger=4.0)
def test_whatever_shares_are_balanced_a_host_keeps_to_the_bound(options, case, ranks_per_host, trigger):
    """On two hosts: to 4k words."""
    k = min(case.k, case.n)
    for ranks in on_shares(case.gradients(), k, ranks_per_host, making(trigger, **options)):
        sent = host_words(ranks, ranks_per_host)[:, 0].max()
        assert sent <= (oktopk_bound(k, case.size) if case.size != 2 else 4 * k)


@pytest.mark.usefixtures("words_for_indices")
@pytest.mark.parametrize("hosts", [2, 3, 4, 6])
def test_shares_climb_a_tree_in_as_many_words_as_the_whole(hosts):
    """But for a count, and a rounded mask, in the messages of each of the host's ranks."""
    k, rounds = 100, len(tree_distances(hosts))
    for ranks in on_shares(Case("normal", 4000, k, hosts, 5, seed=2).gradients(), k, 3, GTopk().build):
        assert host_words(ranks, 3).sum(axis=1).max() <= gtopk_volume(k, 2**rounds) + rounds * (k / 32 + 9)


def whole_numbers(case):
    """Of few bits, so that float32 adds them, and their squares, without rounding."""
    return np.random.default_rng(case.seed).integers(-20, 21, (case.steps, case.size, case.n)).astype(np.float32)


@given(case=cases(dtypes=("float32",)), ranks_per_host=st.integers(1, 4))
def test_gaussiank_has_the_same_bits_where_sums_are_exact(case, ranks_per_host):
    """But for the last ones of the threshold, as the shares' moments are divided before they are added up."""
    gradients, k, make = whole_numbers(case), min(case.k, case.n), GaussianK().build
    flat = advance(new_ranks(case.size, case.n, make=make), gradients, k)
    assert_same_updates(flat, on_shares(gradients, k, ranks_per_host, make))


@given(case=cases(), ranks_per_host=st.integers(1, 4), estimate=st.sampled_from([0.0, 1e-30, 0.7, 2.5, np.inf]))
def test_gaussiank_has_the_same_bits_from_a_given_estimate(case, ranks_per_host, estimate):
    """Thresholds, too; whether many pass, or more than 64 attempts would be needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussiank, "gaussian_threshold", lambda *_: estimate)
        assert_same_as_flat(case.gradients(), min(case.k, case.n), ranks_per_host, GaussianK().build)


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (3, 5)])
def test_gaussiank_estimates_as_one_rank_does(hosts, ranks_per_host):
    gradients, make = Case("normal", 5000, 100, hosts, 4, seed=2).gradients(), GaussianK().build
    gradients += np.linspace(0, 2, 5000, dtype=np.float32)  # so the shares' means differ, and are not zero
    flat = advance(new_ranks(hosts, 5000, make=make), gradients, 100)
    for one, ranks in zip(flat, on_shares(gradients, 100, ranks_per_host, make), strict=True):
        for host, record in enumerate(one):
            thresholds = {report.local_threshold for _, _, report in ranks[host * ranks_per_host:][:ranks_per_host]}
            assert len(thresholds) == 1
            assert thresholds.pop() == pytest.approx(record.report.local_threshold, rel=1e-4)


@given(case=cases(), ranks_per_host=st.integers(1, 4))
def test_gaussiank_keeps_its_promises_on_shares(case, ranks_per_host):
    """Conserves, gives all ranks the same update, selects more than 3k/4 elements and at most k, the largest ones."""
    k = min(case.k, case.n)
    found = on_shares(case.gradients(), k, ranks_per_host, GaussianK().build)
    assert_ranks_agree(found)
    for ranks in records(case.gradients(), found):
        assert_update_is_what_was_cleared(ranks)
        for record in ranks:
            assert_conserved(record)
            assert min((record.acc != 0).sum(), 3 * k // 4) <= record.report.local_selected <= k
            chosen, rest = np.abs(record.acc[record.contributed]), np.delete(np.abs(record.acc), record.contributed)
            assert not len(chosen) or not len(rest) or chosen.min() >= rest.max()


@pytest.mark.usefixtures("words_for_indices")
@pytest.mark.parametrize("scheme", [GaussianK(), GTopk(collective="allgather")], ids=["GaussianK", "naive GTopk"])
def test_a_host_gathers_in_the_words_of_one_rank(scheme):
    gradients = Case("normal", 4000, 100, 3, 4, seed=2).gradients()
    for ranks in on_shares(gradients, 100, 3, scheme.build):
        assert host_words(ranks, 3)[:, 0].max() <= topka_volume(100, 3)


@pytest.mark.parametrize("scheme", [GaussianK(), GTopk(), GTopk(collective="allgather"), OkTopk(selection="reuse"),
                                    OkTopk(strategy="auto")])
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_one_bad_element_drops_the_step_on_all_ranks(scheme, poison):
    """And later steps have the bits of a run without it."""
    gradients = Case("normal", 100, 10, 2, 5, seed=5).gradients()
    bad = np.insert(gradients, 2, gradients[2] / 2, axis=0)
    bad[2, 1, 7] = poison
    found, without = (on_shares(each, 10, 3, scheme.build) for each in (bad, gradients))
    dropped = found.pop(2)
    assert all(update is None and not report.finite for update, _, report in dropped)
    for ranks, others in zip(found, without, strict=True):
        for (update, residual, _), (other, expected, _) in zip(ranks, others, strict=True):
            assert_same_update(update, other)
            assert same_bits(residual, expected)


AUTO = Case("normal", 300, 30, 3, TRIAL + 4, seed=8)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(1, 3), (2, 2), (3, 2), (4, 1)])
def test_every_strategy_has_the_bits_of_as_many_ranks_as_hosts(strategy, hosts, ranks_per_host):
    gradients = replace(AUTO, size=hosts).gradients()
    assert_same_as_flat(gradients, AUTO.k, ranks_per_host, taking(strategy))
    found = on_shares(gradients, AUTO.k, ranks_per_host, taking(strategy))
    assert [ranks[0][2].strategy for ranks in found] == trial_and_then(strategy)


def trial_and_then(strategy, steps=4):
    return ["split"] * (TRIAL // 2) + ["gather"] * (TRIAL // 2) + [strategy.name.lower()] * steps


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize(("n", "hosts", "ranks_per_host"), [(1, 2, 3), (3, 1, 7)])
def test_every_strategy_works_with_more_ranks_than_elements(strategy, n, hosts, ranks_per_host):
    gradients = Case("normal", n, 1, hosts, TRIAL + 2, seed=3).gradients()
    assert_same_as_flat(gradients, 1, ranks_per_host, taking(strategy))


@pytest.mark.parametrize("options", [{"value_dtype": "bfloat16"}, {"value_dtype": "log4"}, {"global_density": 0.03}])
def test_gathering_with_other_options_has_the_same_bits(options):
    """From the first step on, as what splitting leaves over of rounded values depends on the shares."""
    gradients, make = AUTO.gradients()[:4], OkTopk(density=AUTO.k / AUTO.n, strategy="auto", **options).build

    def gathering(description):
        algorithm = make(description)
        algorithm._begin_trial = lambda step: setattr(algorithm, "strategy", Strategy.GATHER)
        return algorithm

    assert_same_as_flat(gradients, AUTO.k, 2, gathering)
    assert {ranks[0][2].strategy for ranks in on_shares(gradients, AUTO.k, 2, gathering)} == {"gather"}


def test_a_dense_step_of_hosts_selects_nothing_and_sends_what_one_rank_would():
    ranks = on_shares(AUTO.gradients(), AUTO.k, 2, taking(Strategy.DENSE))[-1]
    assert (host_words(ranks, 2)[:, 0] == 2 * AUTO.n * (AUTO.size - 1) // AUTO.size).all()
    assert not any("host_select" in report.phases for _, _, report in ranks)
    assert not any(residual.any() for _, residual, _ in ranks)


class Changing:
    """An algorithm that begins anew at a step on one rank; or, if no rank is given, with half of k on all of them."""

    def __init__(self, make, at, rank=None):
        self.make, self.at, self.rank = make, at, rank
        self.algorithm, self.steps = make("test"), 0

    def reduce(self, acc, k, finite, transport, whole=None):
        if self.steps == self.at and transport.everyone.rank == self.rank:
            self.algorithm = self.make("test")
        self.steps += 1
        halved = self.rank is None and self.steps > self.at
        return self.algorithm.reduce(acc, k // 2 if halved else k, finite, transport, whole)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize(("flat", "rank"), [(None, None), (1, 3)])
@pytest.mark.parametrize("at", [TRIAL // 2 + 2, TRIAL + 2])
def test_all_shares_begin_a_new_trial_together(strategy, flat, rank, at):
    """Where k changes, and where one rank of a host is new."""
    gradients, make = replace(AUTO, steps=at + TRIAL + 4).gradients(), taking(strategy)
    expected = advance(new_ranks(3, AUTO.n, make=lambda _: Changing(make, at, flat)), gradients, AUTO.k)
    found = on_shares(gradients, AUTO.k, 2, lambda _: Changing(make, at, rank))
    assert_same_updates(expected, found)
    for ranks in zip(*found, strict=True):
        assert [report.strategy for _, _, report in ranks][at:] == trial_and_then(strategy)


def test_a_strategy_that_nobody_forced_is_taken_by_all_ranks():
    """With the real clock, whatever is fastest here."""
    found = on_shares(AUTO.gradients(), AUTO.k, 2, OkTopk(strategy="auto").build)
    assert_ranks_agree(found)
    assert all(len({report.strategy for _, _, report in ranks}) == 1 for ranks in found)


def joined(transport, ranks_per_host):
    """This rank's transport in a job of so many ranks on a host."""
    grid = np.arange(transport.size).reshape(-1, ranks_per_host)
    return on_hosts(transport, *transport.groups(ranks_per_host), grid)


@pytest.mark.parametrize("slow", range(4))
def test_the_slowest_of_all_ranks_decides(slow, monkeypatch):
    monkeypatch.setattr(auto, "dense_seconds", lambda n, dtype, limit, transport: 9.0)

    def program(transport):
        algorithm = OkTopk(strategy="auto").build("a: 1")
        algorithm._seconds |= {Strategy.SPLIT: [3 if transport.rank == slow else 1], Strategy.GATHER: [2]}
        step = Step(NumpyAccumulator(5), 1, True, joined(transport, 2), StepReport(1, 10, 1))
        return algorithm._fastest(step)

    assert run_ranks(4, program) == [Strategy.GATHER] * 4


def test_a_dense_allreduce_of_hosts_is_timed_with_what_it_takes_on_the_host(monkeypatch):
    monkeypatch.setattr(auto, "DENSE_SAMPLE", 10)

    def program(transport):
        counting = joined(transport, 3)
        return dense_seconds(50, np.float32, 1e3, counting), counting.phases["host_gather"].bytes_received

    found = run_ranks(6, program)
    assert len({seconds for seconds, _ in found}) == 1
    times, others = 1 + timing.SAMPLES, 50 - 50 // 3
    assert found[0][1] > times * 4 * others
