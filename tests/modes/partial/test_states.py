"""The state machine of partial rounds: every transition of one rank, and what holds for all ranks together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_oktopk.modes.partial.states import Activity, BeginRound, Presence, RankState, Service, Signal
from tests.modes.partial.world import World

COMPUTING, WAITING, SYNCHRONIZING, EXITING, SYNCHRONIZED = Activity
ABSENT, STALE, FRESH, GIVEN_UP = Presence
IDLE, HELD, HELPING, CONTRIBUTING = Service
RULES: dict[str, Any] = {"rank": 1, "size": 4, "policy": "solo", "seed": 0, "max_staleness": 3}


def state(**fields: Any) -> RankState:
    return RankState(**RULES, **fields)


def start(number: int) -> Signal:
    return Signal((1,), number)


def spread(number: int) -> Signal:
    return Signal((2, 3), number)


def run(number: int, presence: Presence, activity: Activity = COMPUTING, staleness: int = 0) -> BeginRound:
    return BeginRound(number, presence, activity, staleness)


three = {"rounds_ended": 3}
WAITS = {"activity": WAITING, "handed_in": FRESH}
everyone_goes_on = [COMPUTING] * 4

# (the state before, the event, what changes, the actions)
TRANSITIONS: dict[str, tuple[Any, ...]] = {
    "who comes in time waits, and with solo starts the round":
        ({}, ("arrived",), WAITS, [start(1)]),
    "who comes late, to a round that runs, waits for its end and contributes to the next":
        ({"service": HELPING}, ("arrived",), {"activity": WAITING, "handed_in": STALE}, []),
    "who comes late, to a round that has ended, takes it":
        (three, ("arrived",), {"activity": WAITING, "handed_in": STALE}, []),
    "who is ahead goes on at once":
        ({**three, "taken": 3, "rounds_ahead": 2}, ("arrived",), {"handed_in": STALE, "rounds_ahead": 1}, []),
    "who is ahead, and may be alone, is so no more":
        ({**three, "taken": 3, "rounds_ahead": 2, "training": (1, 2)}, ("arrived",),
         {"handed_in": STALE, "rounds_ahead": 0}, []),
    "who has come before the round, and comes again, contributes both":
        ({"handed_in": STALE}, ("arrived",), WAITS, [start(1)]),
    "a call that an exception has ended may be made again":
        (WAITS, ("arrived",), {}, [start(1)]),
    "an activation runs the round, and goes on to others":
        ({}, ("activated", 1), {"service": HELPING}, [spread(1), run(1, ABSENT)]),
    "a round takes along what waits for it":
        (WAITS, ("activated", 1), {"service": CONTRIBUTING, "handed_in": ABSENT},
         [spread(1), run(1, FRESH, WAITING)]),
    "a round takes along what came too late":
        ({"handed_in": STALE}, ("activated", 1), {"service": CONTRIBUTING, "handed_in": ABSENT},
         [spread(1), run(1, STALE)]),
    "an activation of a round that has been is ignored":
        (three, ("activated", 3), {}, []),
    "a round is held where too many were not taken":
        (three, ("activated", 4), {"service": HELD}, [spread(4)]),
    "a round is not held up by who synchronizes":
        ({**three, "activity": SYNCHRONIZING}, ("activated", 4), {"service": HELPING},
         [spread(4), run(4, ABSENT, SYNCHRONIZING, 3)]),
    "a rank that comes to a held round is late":
        ({**three, "service": HELD}, ("arrived",), {"activity": WAITING, "handed_in": STALE}, []),
    "a held round begins when the others have been taken":
        ({**three, "service": HELD, "activity": WAITING, "handed_in": STALE}, ("took",),
         {"service": CONTRIBUTING, "activity": COMPUTING, "handed_in": ABSENT, "taken": 3, "rounds_ahead": 2},
         [run(4, STALE)]),
    "a held round begins when the program synchronizes":
        ({**three, "service": HELD}, ("synchronizes", False), {"service": HELPING, "activity": SYNCHRONIZING},
         [run(4, ABSENT, SYNCHRONIZING, 3)]),
    "a held round fails in the end":
        ({**three, "service": HELD}, ("gave_up",), {"service": HELPING}, [run(4, GIVEN_UP, staleness=3)]),
    "a round ends":
        ({"service": HELPING}, ("ended", everyone_goes_on),
         {"service": IDLE, "rounds_ended": 1, "training": (0, 1, 2, 3)}, []),
    "a round tells who synchronizes and is not to be drawn":
        ({"service": CONTRIBUTING, "activity": WAITING}, ("ended", [WAITING, COMPUTING, SYNCHRONIZING, EXITING]),
         {"service": IDLE, "rounds_ended": 1, "training": (0, 1)}, []),
    "the program takes its round":
        ({"activity": WAITING, "rounds_ended": 1}, ("took",), {"activity": COMPUTING, "taken": 1}, []),
    "who takes more rounds than it made steps is ahead, up to the bound":
        ({"activity": WAITING, "rounds_ended": 9}, ("took",),
         {"activity": COMPUTING, "taken": 9, "rounds_ahead": 3}, []),
    "who has waited too long starts the round":
        (WAITS, ("overdue",), {}, [start(1)]),
    "who has waited too long for a round that runs waits on":
        ({**WAITS, "service": HELPING}, ("overdue",), {}, []),
    "who synchronizes has one more round begin":
        ({}, ("synchronizes", False), {"activity": SYNCHRONIZING}, [start(1)]),
    "who exits has one more round begin, after the one that runs":
        ({"service": HELPING}, ("synchronizes", True), {"activity": EXITING}, [start(2)]),
    "who synchronizes takes rounds as they end":
        ({**three, "activity": SYNCHRONIZING, "service": HELPING}, ("took",), {"taken": 3}, []),
    "the ranks are synchronized when nobody goes on":
        ({**three, "activity": SYNCHRONIZING, "service": HELPING}, ("ended", [SYNCHRONIZING] * 4),
         {"activity": SYNCHRONIZED, "service": IDLE, "rounds_ended": 4, "synchronized": 4}, []),
    "who has exited is known to who has not":
        ({"activity": SYNCHRONIZING, "service": HELPING}, ("ended", [EXITING, SYNCHRONIZING, EXITING, SYNCHRONIZING]),
         {"activity": SYNCHRONIZED, "service": IDLE, "rounds_ended": 1, "synchronized": 1, "exited": (0, 2)}, []),
    "a round in which all exit is the last":
        ({"activity": EXITING, "service": HELPING}, ("ended", [EXITING] * 4),
         {"activity": SYNCHRONIZED, "service": IDLE, "rounds_ended": 1, "synchronized": 1,
          "exited": (0, 1, 2, 3)}, []),
    "all go on after the same round, though another has ended meanwhile":
        ({"activity": SYNCHRONIZED, "synchronized": 4, "rounds_ended": 5, "taken": 2, "rounds_ahead": 2}, ("took",),
         {"activity": COMPUTING, "taken": 4, "rounds_ahead": 0}, []),
}


@pytest.mark.parametrize("case", TRANSITIONS)
def test_a_transition(case):
    before, (event, *arguments), changes, actions = TRANSITIONS[case]
    after, done = getattr(state(**before), event)(*arguments)
    assert after == replace(state(**before), **changes)
    assert list(done) == actions


def may(before: RankState, event: str) -> bool:
    """Return True if an event can happen in a state."""
    return {"arrived": before.service != CONTRIBUTING, "overdue": before.activity == WAITING,
            "took": before.activity in (SYNCHRONIZING, EXITING, SYNCHRONIZED) or (
                before.activity == WAITING and before.rounds_ended > before.taken and before.service in (IDLE, HELD)),
            "synchronizes": True, "activated": before.service == IDLE, "gave_up": before.service == HELD,
            "ended": before.service in (HELPING, CONTRIBUTING)}[event]


@pytest.mark.parametrize(("event", "argument"), [
    ("arrived", None), ("overdue", None), ("took", None), ("synchronizes", False), ("synchronizes", True),
    ("activated", 5), ("gave_up", None), ("ended", everyone_goes_on), ("ended", [SYNCHRONIZING] * 4)])
def test_every_event_in_every_state_is_refused_or_leads_to_a_sound_one(event, argument):
    for activity, handed_in, service, unseen, ahead in product(Activity, (ABSENT, STALE, FRESH), Service, range(4),
                                                               range(3)):
        before = state(activity=activity, handed_in=handed_in, service=service, rounds_ended=4, taken=4 - unseen,
                       rounds_ahead=ahead, synchronized=4)
        arguments = () if argument is None else (argument,)
        if not may(before, event):
            with pytest.raises(AssertionError):
                getattr(before, event)(*arguments)
            continue
        after, actions = getattr(before, event)(*arguments)
        assert before.taken <= after.taken <= after.rounds_ended <= before.rounds_ended + 1
        assert 0 <= after.rounds_ahead <= RULES["max_staleness"]
        begun = [action for action in actions if isinstance(action, BeginRound)]
        assert len(begun) == (after.is_round_running and not before.is_round_running)
        assert all(action.number == after.rounds_begun == before.rounds_ended + 1 for action in begun)
        kept = handed_in or event == "arrived"
        assert bool(after.handed_in) == (kept and not begun), "what was handed in waits for one round"
        assert (after.service == CONTRIBUTING) == (bool(handed_in) if begun else
                                                   service == CONTRIBUTING and event != "ended")


@pytest.mark.parametrize("training", [None, (2, 5, 6)])
def test_majority_draws_one_rank_for_a_round_and_all_that_train_about_equally(training):
    draws = [rank for ended in range(800) for rank in range(8)
             if RankState(rank, 8, "majority", 0, 16, rounds_ended=ended, training=training).initiator == rank]
    assert len(draws) == 800
    counts = np.bincount(draws, minlength=8)[list(training or range(8))]
    assert counts.min() > 60
    assert counts.sum() == 800, "a rank that synchronizes is not drawn"


def test_all_ranks_know_of_a_round_in_a_logarithm_of_hops():
    for size in range(1, 40):
        known = {0}
        for _ in range((size - 1).bit_length()):
            known |= {to for rank in known
                      for action in RankState(rank, size, "solo", 0, 1).activated(1)[1]
                      if isinstance(action, Signal) for to in action.ranks}
        assert known == set(range(size))


# All ranks together, in any order of events.

@dataclass(frozen=True)
class Plan:
    """Ranks with different numbers of steps between as many synchronizations, and an order of events."""

    steps: list[list[int]]
    """By synchronization, then by rank."""
    policy: str
    seed: int
    max_staleness: int
    speeds: list[float]

    def world(self, may_lose_patience: bool = False) -> World:
        """Return the world in which all ranks have come to their end."""
        calls = [[call for epoch in self.steps for call in (*["step"] * epoch[rank], "synchronize")]
                 for rank in range(len(self.speeds))]
        programs = [[*program[:-1], "exit"] for program in calls]
        world = World(programs, may_lose_patience, self.policy, self.max_staleness, self.seed)
        world.run(Random(self.seed), self.speeds)
        return world


def for_each(values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=size, max_size=size)


PLANS = st.integers(1, 4).flatmap(lambda size: st.builds(
    Plan, steps=st.lists(for_each(st.integers(0, 4), size), min_size=1, max_size=2),
    policy=st.sampled_from(["solo", "majority"]), seed=st.integers(0, 2**32), max_staleness=st.integers(1, 5),
    speeds=for_each(st.sampled_from([1.0, 0.1, 0.01]), size)))
in_any_order = settings(deadline=None, max_examples=50)


@given(PLANS)
@in_any_order
def test_every_gradient_is_in_one_round_in_order_and_all_take_the_same_rounds(plan):
    world = plan.world(may_lose_patience=True)
    for index, rank in enumerate(world.ranks):
        contributed = [step for each in world.rounds for step in each.gradients[index]]
        assert contributed == list(range(rank.steps))
        assert rank.synchronized == world.ranks[0].synchronized
        assert rank.state.taken == len(world.rounds)


@given(PLANS)
@in_any_order
def test_presence_tells_who_contributes_and_nothing_is_run_but_to_synchronize(plan):
    for each in plan.world().rounds:
        for index, begun in each.begun.items():
            assert (begun.presence in (STALE, FRESH)) == bool(each.gradients[index])
        assert any(each.gradients.values()) or not all(begun.activity.goes_on for begun in each.begun.values())


@given(PLANS)
@in_any_order
def test_a_round_begins_when_the_policy_says_so(plan):
    """With solo as soon as one rank has come, with majority when the drawn one has; or when a rank synchronizes."""
    world = plan.world()
    for number, each in enumerate(world.rounds, start=1):
        fresh = {rank for rank, begun in each.begun.items() if begun.presence == FRESH}
        if all(begun.activity.goes_on for begun in each.begun.values()):
            before = world.before[number]
            initiators = {replace(before, rank=rank).initiator for rank in each.begun}
            assert fresh & initiators


@given(PLANS)
@in_any_order
def test_no_rank_falls_back_by_more_than_max_staleness(plan):
    world = plan.world()
    for each in world.rounds:
        for begun in each.begun.values():
            assert begun.staleness < world.ranks[0].state.max_staleness or not begun.activity.goes_on


@given(PLANS)
@in_any_order
def test_a_rank_waits_for_one_round_in_each_step_until_some_rank_synchronizes(plan):
    """In its step s for round s: who has taken more rounds than it made steps does not wait."""
    for number, each in enumerate(replace(plan, max_staleness=1000).world().rounds):
        if not all(begun.activity.goes_on for begun in each.begun.values()):
            break
        for index, begun in each.begun.items():
            assert begun.presence != FRESH or each.gradients[index][-1] == number


@given(PLANS, for_each(st.booleans(), 4))
@in_any_order
def test_ranks_that_exit_are_known_to_all_that_go_on(plan, exits):
    world = World([["step"] * steps + ["exit" if exits[rank] else "synchronize"]
                   for rank, steps in enumerate(plan.steps[0])])
    world.run(Random(plan.seed), plan.speeds)
    exited = tuple(rank for rank in range(len(world.ranks)) if exits[rank])
    assert {rank.state.exited for rank in world.ranks} == {exited}
