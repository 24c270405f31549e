"""Partial allreduce among threads: the four clauses of Lemma 6.1, and what may go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from horovod_oktopk import TransportError
from horovod_oktopk.modes.partial.rounds import PartialAllreduce
from horovod_oktopk.modes.partial.states import Presence
from tests.support.threads import ThreadTransport, run_ranks

STEPS = 12


class Rank:
    """A rank whose step s contributes a one at place s of its own row; an outcome is the sum of all ranks' tables."""

    def __init__(self, transport: ThreadTransport, policy: str, steps: int = STEPS, **options: Any) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.transport = transport
        self.pending = np.zeros((self.size, steps), np.int64)
        self.rounds: list[Any] = []
        self.partial = PartialAllreduce(policy, self.run, transport, transport.signals(), settings=2, **options)

    def run(self, is_active: bool, _settings: tuple[float, ...]) -> np.ndarray:
        handed_in = np.zeros_like(self.pending)
        if is_active:
            handed_in += self.pending
            self.pending[:] = 0
        return self.transport.allreduce(handed_in)

    def arrive(self, step: int) -> None:
        def contribute() -> list[float]:
            self.pending[self.rank, step] += 1
            return [step, 0.1 * self.rank]

        self.rounds += self.partial.arrive(contribute)

    def synchronize(self, for_good: bool = False) -> None:
        for rounds in self.partial.synchronize(for_good):
            self.rounds += rounds


def table(each: Any) -> np.ndarray:
    """Return a round's outcome."""
    return np.zeros((len(each.presences), 1), np.int64) if each.outcome is None else each.outcome


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("policy", ["solo", "majority"])
@pytest.mark.parametrize("uneven", [False, True])
def test_liveness_and_safety(size, policy, uneven):
    """Every call returns; all ranks see the same rounds; each is the sum of what the active ranks had handed in."""
    steps = [STEPS - (rank if uneven else 0) for rank in range(size)]

    def program(transport):
        rank, random = Rank(transport, policy), np.random.default_rng(transport.rank)
        for step in range(steps[transport.rank]):
            time.sleep(random.exponential(0.001 * (1 + transport.rank)))
            rank.arrive(step)
        rank.synchronize(for_good=True)
        rank.partial.end()
        return rank.rounds

    everyone = run_ranks(size, program, timeout=20)
    for rounds in everyone:
        assert [each.number for each in rounds] == list(range(1, len(rounds) + 1))
        assert [each.presences for each in rounds] == [each.presences for each in everyone[0]]
        assert all(np.array_equal(a.outcome, b.outcome) for a, b in zip(rounds, everyone[0], strict=True))
    for each in everyone[0]:
        assert table(each).any(axis=1).tolist() == [presence != Presence.ABSENT for presence in each.presences]
    expected = np.arange(STEPS) < np.array(steps)[:, None]
    assert np.array_equal(sum(map(table, everyone[0])), expected), "each exactly once"


@pytest.mark.parametrize("seed", range(4))
def test_quorum_of_majority_is_the_drawn_rank_and_those_before_it(seed):
    size, order = 4, [2, 0, 3, 1]
    drawn = int(np.random.default_rng((seed, 1)).integers(size))
    before = order[:order.index(drawn) + 1]
    ranks: dict[int, Rank] = {}
    turn = threading.Barrier(size)

    def program(transport):
        rank = ranks[transport.rank] = Rank(transport, "majority", seed=seed)
        turn.wait(20)
        place = order.index(rank.rank)
        wait_until(lambda: all(ranks[other].partial.state.handed_in or ranks[other].partial.state.rounds_ended
                               for other in order[:place]))
        if rank.rank in before:
            assert rank.partial.state.rounds_begun == 0, "the round has begun before the drawn rank came"
        else:
            wait_until(lambda: rank.partial.state.rounds_ended >= 1)
        rank.arrive(0)
        first = rank.rounds[0]
        assert first.presences.count(Presence.FRESH) == len(before)
        rank.synchronize()
        return first.presences

    expected = tuple(Presence.FRESH if rank in before else Presence.ABSENT for rank in range(size))
    assert run_ranks(size, program) == [expected] * size


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_staleness_is_bounded(max_staleness):
    """No more rounds than that run without a rank in a row; then they wait until it comes."""
    waiting = threading.Event()

    def program(transport):
        rank = Rank(transport, "solo", max_staleness=max_staleness)
        if rank.rank == 0:
            for step in range(max_staleness):
                rank.arrive(step)
            threading.Timer(0.2, waiting.set).start()
            rank.arrive(max_staleness)  # returns when rank 1 has come
        else:
            waiting.wait(20)
            assert rank.partial.state.rounds_begun == max_staleness
            rank.arrive(0)
        rank.synchronize()
        return [each.presences for each in rank.rounds[:max_staleness + 1]]

    fresh, stale, absent = Presence.FRESH, Presence.STALE, Presence.ABSENT
    expected = [(fresh, absent)] * max_staleness + [(fresh, stale)]
    assert run_ranks(2, program) == [expected] * 2


def test_a_synchronization_waits_no_longer_than_it_is_told():
    def program(transport):
        rank = Rank(transport, "solo", patience=0.1)
        if rank.rank == 0:
            with pytest.raises(TransportError, match=r"rank 0 has waited for 0.1 s in synchronize_replicas"):
                rank.synchronize()

    run_ranks(2, program)


class Failing(Rank):
    """Its rounds raise."""

    def run(self, is_active: bool, _settings: tuple[float, ...]) -> np.ndarray:
        raise ZeroDivisionError


def test_what_a_round_raises_is_raised_by_the_next_call_on_every_rank():
    def program(transport):
        rank = Failing(transport, "solo")
        with pytest.raises(ZeroDivisionError):
            rank.arrive(0)

    run_ranks(3, program)


def test_with_solo_whoever_comes_first_starts_the_round_with_its_settings():
    """Rank 0 contributes what came too late, rank 2 as well, rank 1 has come: the settings are its own."""
    late = threading.Barrier(3)

    def program(transport):
        rank = Rank(transport, "solo")
        if rank.rank == 1:
            rank.arrive(0)
        wait_until(lambda: rank.partial.state.rounds_ended >= 1)
        if rank.rank != 1:
            rank.arrive(7)
        late.wait(20)
        if rank.rank == 1:
            rank.arrive(1)
        wait_until(lambda: rank.partial.state.rounds_ended >= 2)
        rank.synchronize()
        assert [each.settings for each in rank.rounds[:2]] == [(0, 0.1), (1, 0.1)]
        assert [each.presences for each in rank.rounds[:2]] == [
            (Presence.ABSENT, Presence.FRESH, Presence.ABSENT), (Presence.STALE, Presence.FRESH, Presence.STALE)]

    run_ranks(3, program)


def test_a_round_tells_who_lags_by_how_many_rounds_and_what_was_saved():
    """While rank 1 takes a step, rank 0 takes three: a synchronous step would have waited for it."""
    missed = threading.Event()

    def program(transport):
        rank = Rank(transport, "solo")
        if rank.rank == 0:
            rank.arrive(0)
            assert missed.wait(20)
            rank.arrive(1)
            rank.arrive(2)
        else:
            wait_until(lambda: rank.partial.state.rounds_ended >= 1)
            missed.set()
            wait_until(lambda: rank.partial.state.rounds_ended >= 3)
            time.sleep(0.05)
            rank.arrive(0)
        rank.synchronize()
        assert [each.staleness for each in rank.rounds[:3]] == [(0, 0), (0, 1), (0, 2)]
        assert [each.busy[1] for each in rank.rounds[:3]] == [0, 0, 0]
        assert sum(each.busy[1] for each in rank.rounds) > 0.05
        return [(each.busy, each.seconds, each.seconds_saved) for each in rank.rounds]

    rounds = run_ranks(2, program)
    assert rounds[0] == rounds[1]
    assert all(saved == max(busy) - seconds for busy, seconds, saved in rounds[0])


def test_there_is_one_round_for_a_step():
    """A rank that finds three rounds takes them as those of its next three steps: it starts and awaits none."""
    late, caught_up = threading.Event(), threading.Event()

    def program(transport):
        rank = Rank(transport, "solo")
        if rank.rank == 0:
            for step in range(3):
                rank.arrive(step)
            late.set()
            assert caught_up.wait(20)  # to synchronize begins another round
        else:
            assert late.wait(20)
            wait_until(lambda: rank.partial.state.rounds_ended >= 3)  # rank 0 may know of an end before this one
            seen = []
            for step in range(4):
                rank.arrive(step)
                seen.append(len(rank.rounds))
            caught_up.set()
            assert seen == [3, 3, 3, 4]
            assert rank.rounds[3].presences == (Presence.ABSENT, Presence.FRESH)
        rank.synchronize()
        return sum(map(table, rank.rounds))

    tables = run_ranks(2, program)
    assert np.array_equal(tables[0], tables[1])
    assert tables[0].sum() == 7, "each exactly once"


def test_where_nobody_contributes_nothing_is_run():
    def program(transport):
        rank = Failing(transport, "solo")
        rank.synchronize()
        assert rank.rounds
        assert all(each.outcome is None and not any(each.presences) for each in rank.rounds)

    run_ranks(3, program)


def test_majority_goes_on_without_the_drawn_rank_after_the_timeout():
    come = threading.Event()

    def program(transport):
        rank = Rank(transport, "majority", seed=1, timeout=0.2)
        if rank.rank == int(np.random.default_rng((1, 1)).integers(3)):
            assert come.wait(20)
        else:
            rank.arrive(0)
            come.set()
        rank.synchronize()
        return sum(map(table, rank.rounds)).sum()

    assert run_ranks(3, program) == [2, 2, 2]


def test_a_synchronization_ends_with_the_same_round_on_all_ranks():
    """However slowly a rank takes them, and though another goes on at once."""
    def program(transport):
        rank, seen = Rank(transport, "solo", steps=30), []
        for epoch in range(5):
            for step in range(6 if transport.rank else 1):
                rank.arrive(6 * epoch + step)
                time.sleep(0.005)
            for rounds in rank.partial.synchronize():
                time.sleep(0.01 * (transport.rank == 0))
                rank.rounds += rounds
            seen.append(rank.rounds[-1].number)
        return seen

    everyone = run_ranks(3, program)
    assert everyone[0] == everyone[1] == everyone[2]


def test_ranks_that_go_on_learn_that_another_has_ended():
    """Both serve rounds until all are here, and rank 0 for the last time."""
    def program(transport):
        rank = Rank(transport, "solo")
        rank.arrive(0)
        rank.synchronize(for_good=rank.rank == 0)
        if rank.rank > 0:
            with pytest.raises(TransportError, match=r"ranks \[0\] have ended .* equally often"):
                rank.arrive(1)
            with pytest.raises(TransportError, match=r"ranks \[0\] have ended"):
                rank.synchronize()
            assert not rank.pending.any()
            rank.synchronize(for_good=True)  # so that it can end as well
        rank.partial.end()
        return sum(map(table, rank.rounds))[:, 0].tolist()

    assert run_ranks(3, program) == [[1, 1, 1]] * 3


@pytest.mark.parametrize("policy", ["solo", "majority"])
def test_what_ranks_drop_at_different_times_is_in_a_round_and_all_threads_end(policy):
    """Nobody synchronizes: each rank lets go when it has taken its own number of steps."""
    def program(transport: ThreadTransport) -> tuple[Rank, bool]:
        over = threading.Event()
        rank = Rank(transport, policy, max_staleness=1, when_over=over.set)
        for step in range(4 + 3 * transport.rank):
            rank.arrive(step)
        rank.partial.drop()
        return rank, over.wait(20)

    for rank, is_over in run_ranks(3, program, timeout=40):
        assert is_over
        assert not rank.pending.any(), "a gradient is in no round"
