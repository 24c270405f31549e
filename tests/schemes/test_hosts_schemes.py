"""Each host is one worker: what schemes promise that go by more than a share, as one rank for each host does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_oktopk import GTopk, OkTopk
from horovod_oktopk.schemes.cost import gtopk_volume, oktopk_bound
from horovod_oktopk.schemes.gtopk import tree_distances

from ..support.gradients import Case, cases, each_adversarial
from ..support.simulation import Record, same_bits
from .test_conservation import assert_lawful
from .test_hosts import assert_same_as_flat, on_shares

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
    for ranks in found:
        for update, *_ in ranks[1:]:
            assert same_bits(update.indices, ranks[0][0].indices)
            assert same_bits(update.values, ranks[0][0].values)
    assert_lawful(records(case.gradients(), found), k)


@pytest.mark.parametrize("case", each_adversarial(n=900, k=60, size=5))
def test_reuse_selects_within_the_guard(case):
    """Of the elements that there are."""
    found = on_shares(case.gradients(), case.k, 2, OkTopk(**REUSE, threshold_guard=0.2).build)
    for ranks in records(case.gradients(), found):
        reduced = len(np.unique(np.concatenate([record.contributed for record in ranks])))
        for record in ranks:
            assert record.report.local_selected == min(case.k, (record.acc != 0).sum())
            assert 0.8 * min(case.k, reduced) <= record.report.global_selected <= 1.2 * case.k


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
    for ranks in on_shares(case.gradients(), k, ranks_per_host, OkTopk(balance_trigger=trigger, **options).build):
        sent = host_words(ranks, ranks_per_host)[:, 0].max()
        assert sent <= (oktopk_bound(k, case.size) if case.size != 2 else 4 * k)


@pytest.mark.usefixtures("words_for_indices")
@pytest.mark.parametrize("hosts", [2, 3, 4, 6])
def test_shares_climb_a_tree_in_as_many_words_as_the_whole(hosts):
    """But for a count, and a rounded mask, in the messages of each of the host's ranks."""
    k, rounds = 100, len(tree_distances(hosts))
    for ranks in on_shares(Case("normal", 4000, k, hosts, 5, seed=2).gradients(), k, 3, GTopk().build):
        assert host_words(ranks, 3).sum(axis=1).max() <= gtopk_volume(k, 2**rounds) + rounds * (k / 32 + 9)
