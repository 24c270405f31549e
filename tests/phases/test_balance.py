"""Balancing before the allgatherv: the plan's arithmetic, and that it changes the traffic but no bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.phases.balance import BalancePlan, needs_balance
from horovod_oktopk.phases.link import Link
from horovod_oktopk.phases.regions import Regions
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.vectors.sparse import SparseVector, concatenate
from horovod_oktopk.vectors.wire import WireCodec
from tests.support.threads import run_ranks

from ..schemes.test_conservation import assert_lawful
from ..support.simulation import same_runs, simulate


def moves_of(plan):
    """Return the elements that go from position i to position j. Shape (P, P)."""
    positions = np.arange(len(plan.before) - 1)
    return plan.moved(positions[:, None], positions)


SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=9).map(np.array)


@given(SIZES)
def test_moves_add_up_to_equal_shares(sizes):
    plan = BalancePlan(sizes)
    shares = np.diff(plan.after)
    assert (moves_of(plan) >= 0).all()
    assert moves_of(plan).sum(axis=1).tolist() == sizes.tolist()
    assert moves_of(plan).sum(axis=0).tolist() == shares.tolist()
    assert shares.sum() == sizes.sum()
    assert shares.max() - shares.min() <= 1


def test_a_share_lies_in_the_regions_that_it_comes_from():
    plan = BalancePlan(np.array([8, 0, 2, 2]))
    _, starts, stops = np.transpose(plan.extents(np.array([0, 10, 20, 30, 40])))
    assert (starts.tolist(), stops.tolist()) == ([0, 0, 0, 20], [10, 10, 30, 40])


def test_equal_shares_stay_in_their_regions():
    plan = BalancePlan(np.array([4, 4, 4]))
    assert moves_of(plan).tolist() == np.diag([4, 4, 4]).tolist()
    _, starts, stops = np.transpose(plan.extents(np.array([0, 10, 20, 30])))
    assert (starts.tolist(), stops.tolist()) == ([0, 10, 20], [10, 20, 30])


@pytest.mark.parametrize(("sizes", "trigger", "expected"), [
    ([8, 0, 0, 0], 3.9, True), ([8, 0, 0, 0], 4.0, False), ([3, 1, 1, 1], 1.0, True), ([2, 2], 1.0, False),
    ([5], 1.0, False), ([0, 0], 1.0, False)])
def test_balance_is_wanted_past_a_multiple_of_the_mean(sizes, trigger, expected):
    assert needs_balance(np.array(sizes), trigger) is expected


@given(SIZES, st.integers(0, 8))
def test_balanced_shares_are_the_same_elements_in_the_same_order(sizes, rotation):
    size, total = len(sizes), int(sizes.sum())
    everything = SparseVector(np.arange(total) * 3, np.arange(total, dtype=np.float32))
    plan = BalancePlan(sizes)
    boundaries = np.append(3 * plan.before[:-1], 3 * total + 1)
    _, starts, stops = np.transpose(plan.extents(boundaries))

    def program(transport):
        position = (transport.rank - rotation) % size
        chosen = everything[plan.before[position]:plan.before[position + 1]]
        ranks = Link(CountingTransport(transport), WireCodec("float32"))
        routes = plan.routes(Regions(boundaries, sizes, sizes, rotation), transport.rank)
        return position, concatenate(ranks.send_and_receive(chosen, *routes), "float32")

    shares = dict(run_ranks(size, program, timeout=10))
    assert [len(shares[position]) for position in range(size)] == np.diff(plan.after).tolist()
    for at, share in shares.items():
        assert all(starts[at] <= index < stops[at] for index in share.indices)
    assert np.concatenate([shares[at].indices for at in range(size)]).tolist() == everything.indices.tolist()
    assert np.concatenate([shares[at].values for at in range(size)]).tolist() == everything.values.tolist()


def one_owner(**options):
    """Return gradients whose local elements lie evenly, but only the last ones are large in sum."""
    rng = np.random.default_rng(0)
    gradients = np.zeros((5, 8, 2000), np.float32)
    for rank in range(8):
        gradients[:, rank, rank * 220:rank * 220 + 90] = rng.uniform(1, 2, (5, 90))
    gradients[:, :, 1900:1910] = 100
    gradients[:, 7, 1540:1630] *= 20
    return simulate(gradients, 100, **options)


def spread(run):
    """Return the difference between the most and the fewest bytes that a rank sends in the allgatherv."""
    sent = [record.report.phases["allgatherv"].bytes_sent for record in run[0]]
    return max(sent) - min(sent)


def test_balance_levels_what_ranks_send_and_changes_no_bit():
    run, never = one_owner(), one_owner(balance_trigger=1e9)
    assert_lawful(run, 100)
    assert all(record.report.balanced for record in run[0])
    assert run[0][0].report.phases["balance"].messages_received > 0
    assert not any(record.report.balanced for ranks in never for record in ranks)
    assert spread(run) <= 24 < 200 <= spread(never)
    assert same_runs(run, never)
    assert same_runs(one_owner(balance_trigger=1.0), never)
