"""FlatReducer where each host is one worker, on ranks that are threads."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from horovod_oktopk import AgreementError, OkTopk
from horovod_oktopk.reducer import checkpoint
from horovod_oktopk.reducer.host_accumulator import HostAccumulator

from .test_flat import OPTIONS, N, make, on_ranks, take_step, take_steps

ON_HOSTS = OkTopk(density=0.1, region_interval=5, hierarchical=2)


def gradients(steps, size, seed=0):
    """Of small whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-99, 100, (steps, size, N)).astype(np.float32)


def updates_of(reducer, own):
    """The update of each step, as bytes: a vector of NaN where it was undone."""
    undone = np.full(N, np.nan, np.float32)
    found = [take_step(reducer, gradient.copy()) for gradient in own]
    return [(undone if update is None else update).tobytes() for update in found]


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(1, 2), (2, 2), (3, 2), (2, 3), (4, 1)])
def test_the_update_is_that_of_ranks_with_the_hosts_sums(hosts, ranks_per_host):
    given = gradients(6, hosts * ranks_per_host)
    sums = given.reshape(6, hosts, ranks_per_host, N).sum(axis=2)
    options = OkTopk(density=0.1)

    def flat(transport):
        return updates_of(make(transport, options=options), sums[:, transport.rank])

    def program(transport):
        reducer = make(transport, options=replace(options, hierarchical=ranks_per_host))
        found = updates_of(reducer, given[:, transport.rank])
        return found, reducer.read_residual()

    expected, found = on_ranks(hosts, flat), on_ranks(hosts * ranks_per_host, program)
    assert all(updates == expected[0] for updates, _ in found)
    sent = sum(np.frombuffer(update, np.float32) for update in expected[0])
    assert np.array_equal(sent + sum(residual for _, residual in found), given.sum(axis=(0, 1)))


def test_the_average_is_over_all_ranks():
    given = gradients(2, 4)

    def program(transport):
        return [updates_of(make(transport, options=ON_HOSTS, average=average), given[:, transport.rank])
                for average in (True, False)]

    means, totals = on_ranks(4, program)[0]
    for mean, total in zip(means, totals, strict=True):
        assert np.array_equal(np.frombuffer(mean, np.float32) * 4, np.frombuffer(total, np.float32))


def test_a_rank_keeps_its_share():
    def program(transport):
        reducer = make(transport, options=ON_HOSTS)
        take_steps(reducer, transport.rank, range(2))
        acc = reducer.accumulator
        assert isinstance(acc, HostAccumulator)
        return acc.residual.nbytes + acc._acc.nbytes

    assert on_ranks(4, program) == [2 * 4 * 51, 2 * 4 * 52] * 2


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_bad_gradient_undoes_the_step_on_all_ranks(poison):
    given = gradients(4, 4)
    bad = given.copy()
    bad[2, 1, 60] = poison

    def program(transport):
        reducer = make(transport, options=ON_HOSTS)
        before = updates_of(reducer, bad[:2, transport.rank])
        residual = reducer.read_residual()
        undone = take_step(reducer, bad[2, transport.rank].copy())
        return before, undone is None, np.array_equal(residual, reducer.read_residual())

    assert [found[1:] for found in on_ranks(4, program)] == [(True, True)] * 4


@pytest.mark.parametrize("odd", [[1], [0, 1], [3], [0, 2]])
def test_ranks_that_differ_all_raise_before_gradients_are_sent(odd):
    """Within a host, and hosts among each other."""
    def program(transport):
        options = replace(ON_HOSTS, density=0.2) if transport.rank in odd else ON_HOSTS
        with pytest.raises(AgreementError, match="density: 0.1.*density: 0.2|density: 0.2.*density: 0.1") as raised:
            take_step(make(transport, options=options), np.ones(N, np.float32))
        return str(raised.value)

    assert len(set(on_ranks(4, program))) == 1


@pytest.mark.parametrize("odd", [[1], [0, 1], [3], [0, 2]])
def test_ranks_that_come_to_differ_all_raise(odd):
    def program(transport):
        reducer = make(transport, options=ON_HOSTS)
        take_steps(reducer, transport.rank, range(2))
        if transport.rank in odd:
            reducer.set_density(0.2)
        residual = reducer.read_residual()
        gradient = np.ones(N, np.float32)
        with pytest.raises(AgreementError, match="density"):
            take_step(reducer, gradient)
        assert (gradient == 1).all(), "no gradient was touched"
        assert np.array_equal(residual, reducer.read_residual())
        return True

    assert all(on_ranks(4, program))


def test_a_file_gives_every_rank_its_state_back(tmp_path):
    def program(transport):
        reducer = make(transport, options=ON_HOSTS)
        take_steps(reducer, transport.rank, range(6))
        checkpoint.save([reducer], tmp_path / "state")
        expected = take_steps(reducer, transport.rank, range(6, 12)), reducer.read_residual()
        resumed = make(transport, options=ON_HOSTS)
        checkpoint.load(resumed, 0, tmp_path / "state")
        found = take_steps(resumed, transport.rank, range(6, 12)), resumed.read_residual()
        return all(a.tobytes() == b.tobytes() for a, b in zip(expected, found, strict=True))

    assert on_ranks(4, program) == [True] * 4


@pytest.mark.parametrize(("former", "former_host", "size", "host"), [
    (4, 2, 4, False), (4, False, 4, 2), (4, 2, 4, 4), (6, 3, 4, 2), (2, False, 6, 2), (4, 2, 1, False)])
def test_another_shape_keeps_the_sum(former, former_host, size, host, tmp_path):
    given = gradients(5, former)

    def before(transport):
        reducer = make(transport, options=replace(OPTIONS, hierarchical=former_host))
        updates = updates_of(reducer, given[:4, transport.rank])
        checkpoint.save([reducer], tmp_path / "state")
        return updates

    def after(transport):
        reducer = make(transport, options=replace(OPTIONS, hierarchical=host))
        checkpoint.load(reducer, 0, tmp_path / "state")
        own = given[4, transport.rank::size].sum(axis=0)
        return updates_of(reducer, [own]), reducer.read_residual()

    sent = on_ranks(former, before)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on_ranks(size, after)
    sent += found[0][0]
    total = sum(np.frombuffer(update, np.float32) for update in sent) + sum(residual for _, residual in found)
    assert np.array_equal(total, given.sum(axis=(0, 1)))


def test_who_the_ranks_are_may_change():
    """The residual comes to those that keep it now."""
    given = gradients(6, 4)

    def program(transport):
        reducer = make(transport, options=ON_HOSTS)
        found = updates_of(reducer, given[:3, transport.rank])
        reducer.network.resets += 1
        found += updates_of(reducer, given[3:, transport.rank])
        return found, reducer.read_residual()

    found = on_ranks(4, program)
    sent = sum(np.frombuffer(update, np.float32) for update in found[0][0])
    assert np.array_equal(sent + sum(residual for _, residual in found), given.sum(axis=(0, 1)))

