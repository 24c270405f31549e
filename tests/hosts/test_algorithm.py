"""Each host is one worker, and its ranks hold a slice each: every scheme selects on the host, and then by slice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk, SameBlocks
from horovod_oktopk.hosts.algorithm import apportioned
from horovod_oktopk.phases.volume import oktopk_bound

from ..support.gradients import Case, cases, each_adversarial
from ..support.schemes import SCHEMES
from ..support.simulation import dense, keeping, making, same_bits, simulate
from ..support.slices import by_host, on_slices

KEEPS_ALL = {"TopkA", "TopkDSA"}
"""Schemes whose update is the sum of all selections."""


def assert_lawful(run, ranks_per_host, k, n):
    """Assert that replicas agree, that nothing is lost, and that a host sends no more than its k largest elements."""
    assert_conserved(run, ranks_per_host, n)
    for ranks in run:
        acc, sent = (by_host([rank[part] for rank in ranks], ranks_per_host) for part in (1, 3))
        for own, is_sent in zip(acc, sent, strict=True):
            assert is_sent.sum() <= k
            least = np.sort(np.abs(own))[-min(k, n)]
            assert (np.abs(own[is_sent]) >= least).all()


def assert_conserved(run, ranks_per_host, n):
    """Assert that replicas agree, and that nothing is lost."""
    for ranks in run:
        update = ranks[0][0]
        for other, *_ in ranks:
            assert_same_update(update, other)
        acc, residual = (by_host([rank[part] for rank in ranks], ranks_per_host) for part in (1, 2))
        np.testing.assert_allclose(acc.sum(axis=0), residual.sum(axis=0) + dense(update, n), rtol=1e-5,
                                   atol=1e-5 * np.abs(acc).max())


def assert_same_update(left, right):
    assert same_bits(left.values, right.values)
    assert same_bits(left.indices, right.indices)


def test_a_host_that_remembers_other_boundaries_re_evaluates_with_all_others():
    def change(host, memory):
        if memory.step != 3 or host != 1:
            return memory
        return replace(memory, boundaries=memory.boundaries - [0, 1, 0])

    gradients = Case("steady", 301, 20, 2, 6, seed=3).gradients()
    run = on_slices(gradients, 20, 2, making(threshold_interval=100, region_interval=100), change)
    assert_lawful(run, 2, 20, 301)
    assert [[report.repartitioned for *_, report in ranks] for ranks in run] == [
        [number in (0, 3)] * 4 for number in range(6)]


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "SameBlocks"])
@pytest.mark.parametrize(("n", "k", "hosts", "ranks_per_host"), [
    (301, 20, 1, 3), (301, 20, 2, 2), (301, 20, 3, 2), (301, 20, 2, 5), (301, 20, 4, 1),
    (1, 1, 2, 3), (2, 1, 3, 4), (3, 1, 1, 7)])
def test_every_scheme_works_on_hosts(name, n, k, hosts, ranks_per_host):
    """Also where a host has more ranks than there are elements."""
    gradients = Case("normal", n, k, hosts, 6, seed=3).gradients()
    run = on_slices(gradients, k, ranks_per_host, SCHEMES[name].algorithm)
    assert_lawful(run, ranks_per_host, k, n)
    if name in KEEPS_ALL:  # where all is kept, it does not matter who adds it up
        for ranks, flat in zip(run, simulate(gradients, k, make=SCHEMES[name].algorithm), strict=True):
            assert np.array_equal(dense(ranks[0][0], n), dense(flat[0].update, n))


@pytest.mark.parametrize("ranks_per_host", [1, 2, 5])
def test_of_every_slice_the_same_blocks_are_sent_on_all_hosts(ranks_per_host):
    gradients = Case("normal", 3001, 700, 3, 8, seed=3).gradients()
    run = on_slices(gradients, 700, ranks_per_host, SameBlocks().algorithm)
    assert_conserved(run, ranks_per_host, 3001)
    for ranks in run:
        sent = by_host([rank[3] for rank in ranks], ranks_per_host)
        assert (sent == sent[0]).all()
        assert 0 < sent[0].sum() <= 700
    assert np.any([by_host([rank[3] for rank in ranks], ranks_per_host)[0] for ranks in run], axis=0).all()


@pytest.mark.parametrize("ranks_per_host", [2, 5])
def test_of_every_slice_the_largest_sums_are_kept_in_proportion_to_what_was_selected(ranks_per_host):
    gradients = Case("normal", 301, 20, 3, 4, seed=3).gradients()
    bounds = 301 * np.arange(ranks_per_host + 1) // ranks_per_host
    for ranks in on_slices(gradients, 20, ranks_per_host, OkTopk().algorithm):
        acc = by_host([rank[1] for rank in ranks], ranks_per_host)
        selected = np.zeros_like(acc)
        for own, out in zip(acc, selected, strict=True):
            top = np.argsort(-np.abs(own), kind="stable")[:20]
            out[top] = own[top]
        lengths = np.array([(selected[:, start:stop] != 0).sum() for start, stop in pairwise(bounds)])
        update = dense(ranks[0][0], 301)
        assert (update != 0).sum() == 20 == ranks[0][4].global_selected
        for (start, stop), kept in zip(pairwise(bounds), apportioned(20, lengths), strict=True):
            sums = selected[:, start:stop].sum(axis=0)
            largest = np.sort(np.argsort(-np.abs(sums), kind="stable")[:kept])
            assert np.flatnonzero(update[start:stop]).tolist() == largest.tolist()


@pytest.mark.parametrize("name", ["OkTopk", "TopkA"])
def test_one_host_selects_what_one_rank_would(name):
    gradients = Case("normal", 301, 20, 1, 5, seed=3).gradients()
    run = on_slices(gradients, 20, 3, SCHEMES[name].algorithm)
    for ranks, flat in zip(run, simulate(gradients, 20, make=SCHEMES[name].algorithm), strict=True):
        assert_same_update(ranks[0][0], flat[0].update)
        assert same_bits(by_host([rank[2] for rank in ranks], 3)[0], flat[0].residual)


@pytest.mark.parametrize("case", each_adversarial(steps=4))
def test_wherever_the_top_k_lies(case):
    assert_lawful(on_slices(case.gradients(), case.k, 3, OkTopk().algorithm), 3, case.k, case.n)


@given(case=cases(), ranks_per_host=st.integers(1, 4))
def test_any_vector_on_any_number_of_ranks(case, ranks_per_host):
    k = min(case.k, case.n)
    run = on_slices(case.gradients(), k, ranks_per_host, OkTopk().algorithm)
    assert_lawful(run, ranks_per_host, k, case.n)


@pytest.mark.parametrize("kept", [1, 7, 40, 60])
def test_more_or_less_is_kept_of_the_sum(kept):
    case = Case("normal", 301, 20, 3, 4, seed=5)
    run = on_slices(case.gradients(), case.k, 2, keeping(kept, case))
    assert_lawful(run, 2, case.k, case.n)
    # Of 60 some fall on the same place, or cancel.
    assert all(len(rank[0]) == kept or kept == 60 for ranks in run for rank in ranks)


@pytest.mark.parametrize("name", ["OkTopk", "GTopk"])
def test_all_sums_are_kept_that_there_are_places_for(name):
    """Also where hosts have selected the same elements of one slice, and others of the next one."""
    gradients = np.random.default_rng(0).standard_normal((3, 2, 40)).astype(np.float32)  # by step and host
    gradients[:, 0, 20:30] = gradients[:, 1, 30:] = 0
    for ranks in on_slices(gradients, 40, 2, SCHEMES[name].algorithm):
        assert len(ranks[0][0]) == 40
        assert not by_host([rank[2] for rank in ranks], 2).any()


def of_slices(parts):
    """Return the gradients of two steps; in slices of 100, the second one has (host, slice, start, stop, value)."""
    gradients = np.zeros((2, 5, 2, 100), np.float32)
    gradients[0, :, :, ::2] = 1e-6  # equal regions, and nothing left
    for host, part, start, stop, value in parts:
        gradients[1, host, part, start:stop] = value
    return gradients.reshape(2, 5, 200)


def test_the_bound_holds_where_one_slice_is_selected_alike_and_the_other_is_not(words_for_indices):
    """Slices divide k' otherwise than k then, and with it what the bound leaves to each."""
    alike = [(host, 0, 20 * block, 20 * block + (20 if host == 0 or host == block else 15), 0.5)
             for host in range(5) for block in range(5) if host or block]
    large = [(host, 0, 20 * block, 20 * block + 10, 5.0) for host in range(5) for block in (2, 3)]
    others = [(host, 1, 20 * block + 4 * host, 20 * block + 4 * host + 4, 0.5 if block else 5.0)
              for host in range(5) for block in range(5)]
    run = on_slices(of_slices([*alike, *large, *others]), 100, 2, making(density=0.5, global_density=0.2))
    for ranks in run:
        words = np.array([rank[4].payload_bytes()[0] / 4 for rank in ranks]).reshape(5, 2).sum(axis=1)
        assert words.max() <= oktopk_bound(100, 5, 40)
        assert len(ranks[0][0]) == 40


@given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=8), total=st.integers(0, 200))
def test_a_number_is_apportioned(weights, total):
    weights = np.array(weights)
    found = apportioned(total, weights)
    assert found.sum() == min(total, weights.sum())
    assert (found <= weights).all()
    assert (np.abs(found - min(total, weights.sum()) * weights / max(1, weights.sum())) < 1).all()


def one_owner(hosts):
    """Return gradients of which host 0 selects nothing in its own region, and the sum's whole top-k lies there."""
    each = 8 * (hosts - 1)  # elements that a host selects of a slice
    length, rng = 40 * each, np.random.default_rng(2)
    gradients = rng.uniform(0, 0.01, (3, hosts, 2, length)).astype(np.float32)
    for part in range(2):
        for host in range(hosts):
            own = np.arange(host - 1, each, hosts - 1) if host else np.arange(0)
            others = each + rng.choice(length - each, each - len(own), replace=False)
            gradients[:, host, part, own] += 100
            gradients[:, host, part, others] += 1
    return gradients.reshape(3, hosts, -1), 2 * each


@pytest.mark.usefixtures("words_for_indices")
@pytest.mark.parametrize("trigger", [1.0, 4.0])
@pytest.mark.parametrize("hosts", [3, 5, 8])
def test_a_host_sends_no_more_than_the_bound_of_one_rank(hosts, trigger):
    gradients, k = one_owner(hosts)
    for ranks in on_slices(gradients, k, 2, making(balance_trigger=trigger)):
        assert words_sent(ranks, 2).max() <= oktopk_bound(k, hosts)


def words_sent(ranks, ranks_per_host):
    """Return the words of payload by all ranks of each host: shape (H,)."""
    words = np.array([report.payload_bytes()[0] for *_, report in ranks]) / 4
    return words.reshape(-1, ranks_per_host).sum(axis=1)


@pytest.mark.usefixtures("words_for_indices")
@given(case=cases(dtypes=("float32",)), ranks_per_host=st.integers(1, 4), trigger=st.sampled_from([1.0, 4.0, 1e9]))
@example(case=Case("cluster_per_rank", 3, 1, 5, 10, seed=0), ranks_per_host=2, trigger=4.0)
def test_whatever_slices_are_balanced_a_host_keeps_to_the_bound(case, ranks_per_host, trigger):
    """On two hosts: to 4k words."""
    k = min(case.k, case.n)
    for ranks in on_slices(case.gradients(), k, ranks_per_host, making(trigger, region_interval=8)):
        assert words_sent(ranks, ranks_per_host).max() <= (oktopk_bound(k, case.size) if case.size != 2 else 4 * k)


def test_slices_are_balanced():
    gradients = Case("normal", 400, 40, 4, 4, seed=3).gradients()
    found = on_slices(gradients, 40, 2, making(balance_trigger=1.0))
    assert any(report.balanced for step in found for *_, report in step)
