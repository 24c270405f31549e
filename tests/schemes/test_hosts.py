"""Each host is one worker, and its ranks share its elements: the bits of as many ranks as there are hosts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk
from horovod_oktopk.phases.exchange import oktopk_bound
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import on_hosts
from tests.support.threads import run_ranks

from ..support.gradients import Case, cases, each_adversarial
from ..support.simulation import keeping, making, same_bits, simulate

SCHEMES = {
    "OkTopk": OkTopk().algorithm, "often cut": OkTopk(region_interval=2).algorithm,
    "always balanced": making(balance_trigger=1.0)}


def on_shares(gradients, k, ranks_per_host, make):
    """Take steps with the hosts' gradients, shape (steps, H, n); return the updates, and residuals (H, n)."""
    steps, size, n = gradients.shape
    bounds = (n * np.arange(ranks_per_host + 1) // ranks_per_host).tolist()

    def program(transport):
        host, local = divmod(transport.rank, ranks_per_host)
        across, within = transport.groups(ranks_per_host)
        grid = np.arange(transport.size).reshape(size, ranks_per_host)
        counting = on_hosts(transport, across, within, grid)
        mine = slice(bounds[local], bounds[local + 1])
        acc, algorithm, found = NumpyAccumulator(bounds[local + 1] - bounds[local], gradients.dtype), make(), []
        for step in gradients:
            counting.reset()
            finite = acc.accumulate([(0, step[host, mine].copy())])
            result = algorithm.reduce(acc, k, finite, counting, whole=n)
            if result.update is not None:
                acc.commit(result.contributed, result.remainder)
            found.append((result.update, acc.residual.copy(), result.report))
        return found

    by_rank = run_ranks(size * ranks_per_host, program)
    return [list(step) for step in zip(*by_rank, strict=True)]


def assert_same_as_flat(gradients, k, ranks_per_host, make):
    """Assert the same updates, residuals and reports."""
    _, size, n = gradients.shape
    flat = simulate(gradients, k, make=make)
    for one, ranks in zip(flat, on_shares(gradients, k, ranks_per_host, make), strict=True):
        for rank, (update, _, report) in enumerate(ranks):
            host = one[rank // ranks_per_host]
            assert_same_update(update, host.update)
            assert report.global_selected == host.report.global_selected
            assert report.local_threshold == host.report.local_threshold
        residuals = np.concatenate([residual for _, residual, _ in ranks]).reshape(size, n)
        assert same_bits(residuals, np.stack([record.residual for record in one]))


def assert_same_update(left, right):
    assert same_bits(left.values, right.values)
    assert same_bits(left.indices, right.indices)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("n", "k", "hosts", "ranks_per_host"), [
    (301, 20, 1, 3), (301, 20, 2, 2), (301, 20, 3, 2), (301, 20, 2, 5), (301, 20, 4, 1),
    (1, 1, 2, 3), (2, 1, 3, 4), (3, 1, 1, 7)])
def test_the_bits_are_those_of_as_many_ranks_as_hosts(name, n, k, hosts, ranks_per_host):
    """Also where a host has more ranks than there are elements."""
    assert_same_as_flat(Case("normal", n, k, hosts, 5, seed=3).gradients(), k, ranks_per_host, SCHEMES[name])


@pytest.mark.parametrize("value_dtype", ["bfloat16", "log4"])
@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (3, 2), (2, 5)])
def test_values_are_rounded_alike(value_dtype, hosts, ranks_per_host):
    """The owner of a sum keeps what rounding leaves over, and the shares decide who that is: so residuals have
    the same sum over the hosts, and one step has the same bits."""
    gradients, make = Case("normal", 301, 20, hosts, 1, seed=3).gradients(), OkTopk(value_dtype=value_dtype).algorithm
    (flat,) = simulate(gradients, 20, make=make)
    (ranks,) = on_shares(gradients, 20, ranks_per_host, make)
    for update, _, _ in ranks:
        assert_same_update(update, flat[0].update)
    residuals = np.concatenate([residual for _, residual, _ in ranks]).reshape(hosts, 301)
    np.testing.assert_allclose(residuals.sum(axis=0), sum(record.residual for record in flat), atol=1e-6)


@pytest.mark.parametrize("case", each_adversarial(steps=4))
def test_wherever_the_top_k_lies(case):
    assert_same_as_flat(case.gradients(), case.k, 3, OkTopk().algorithm)


@given(case=cases(), ranks_per_host=st.integers(1, 4))
def test_any_vector_on_any_number_of_ranks(case, ranks_per_host):
    assert_same_as_flat(case.gradients(), min(case.k, case.n), ranks_per_host, OkTopk().algorithm)


@pytest.mark.parametrize("kept", [1, 7, 40, 60])
def test_more_or_less_is_kept_of_the_sum(kept):
    case = Case("normal", 301, 20, 3, 4, seed=5)
    assert_same_as_flat(case.gradients(), case.k, 2, keeping(kept, case))


def one_owner(hosts):
    """Return gradients of which host 0 selects nothing in its own region, and the sum's whole top-k lies there."""
    each = 8 * (hosts - 1)  # elements that a host selects of a share
    length, rng = 40 * each, np.random.default_rng(2)
    gradients = rng.uniform(0, 0.01, (3, hosts, 2, length)).astype(np.float32)
    for share in range(2):
        for host in range(hosts):
            own = np.arange(host - 1, each, hosts - 1) if host else np.arange(0)
            others = each + rng.choice(length - each, each - len(own), replace=False)
            gradients[:, host, share, own] += 100
            gradients[:, host, share, others] += 1
    return gradients.reshape(3, hosts, -1), 2 * each


@pytest.mark.usefixtures("words_for_indices")
@pytest.mark.parametrize("trigger", [1.0, 4.0])
@pytest.mark.parametrize("hosts", [3, 5, 8])
def test_a_host_sends_no_more_than_the_bound_of_one_rank(hosts, trigger):
    gradients, k = one_owner(hosts)
    for ranks in on_shares(gradients, k, 2, making(balance_trigger=trigger)):
        assert words_sent(ranks, 2).max() <= oktopk_bound(k, hosts)


def words_sent(ranks, ranks_per_host):
    """Return the words of payload by all ranks of each host: shape (H,)."""
    words = np.array([report.payload_bytes()[0] for _, _, report in ranks]) / 4
    return words.reshape(-1, ranks_per_host).sum(axis=1)


@pytest.mark.usefixtures("words_for_indices")
@given(case=cases(dtypes=("float32",)), ranks_per_host=st.integers(1, 4), trigger=st.sampled_from([1.0, 4.0, 1e9]))
@example(case=Case("cluster_per_rank", 3, 1, 5, 10, seed=0), ranks_per_host=2, trigger=4.0)
def test_whatever_shares_are_balanced_a_host_keeps_to_the_bound(case, ranks_per_host, trigger):
    """On two hosts: to 4k words."""
    k = min(case.k, case.n)
    for ranks in on_shares(case.gradients(), k, ranks_per_host, making(trigger, region_interval=8)):
        assert words_sent(ranks, ranks_per_host).max() <= (oktopk_bound(k, case.size) if case.size != 2 else 4 * k)


def test_shares_are_balanced():
    gradients = Case("normal", 400, 40, 4, 4, seed=3).gradients()
    found = on_shares(gradients, 40, 2, SCHEMES["always balanced"])
    assert any(report.balanced for step in found for _, _, report in step)
