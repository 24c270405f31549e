"""The life of StepAhead's parameters: a table, which needs no ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from horovod_oktopk.modes.step_ahead.life import SHOWN, TABLE, Event, Life, after

HOLDS_P = {Life.STARTED, Life.RESTORED, Life.STEPPING}
"""States in which the model holds this rank's own parameters, and there are shared ones beside them."""


def lived(*events: Event, life: Life = Life.NEW) -> Life:
    for event in events:
        life = after(life, event)
    return life


@pytest.mark.parametrize(("events", "expected"), [
    ([Event.START, Event.AGREE], Life.STEPPING),
    ([Event.START, Event.AGREE, Event.SHOW, Event.HIDE], Life.STEPPING),
    ([Event.START, Event.AGREE, Event.SHOW, Event.CHANGE, Event.HIDE], Life.STARTED),
    ([Event.LOAD, Event.START, Event.AGREE], Life.STEPPING),
    ([Event.START, Event.AGREE, Event.SHOW, Event.LOAD, Event.START], Life.RESTORED),
    ([Event.START, Event.AGREE, Event.SUSPEND, Event.START], Life.RESTORED),
    ([Event.START, Event.SHOW, Event.SUSPEND, Event.START, Event.RESET], Life.NEW),
    ([Event.LOAD, Event.START, Event.START], Life.STARTED)])
def test_a_life(events: list[Event], expected: Life) -> None:
    assert lived(*events) is expected


@pytest.mark.parametrize("life", Life)
def test_where_the_model_holds_w_it_can_neither_be_started_nor_compared_nor_shown_again(life: Life) -> None:
    assert life.is_shown == (life in SHOWN.values()) == (life.is_started and life not in HOLDS_P)
    if life.is_shown:
        for event in (Event.START, Event.AGREE, Event.SHOW, Event.RESET):
            with pytest.raises(KeyError):
                after(life, event)


def test_what_is_put_into_the_model_is_taken_out_again() -> None:
    """The model's parameters are swapped by SHOW, HIDE and SUSPEND, and given anew before START and after LOAD."""
    for life in HOLDS_P:
        assert lived(Event.SHOW, Event.HIDE, life=life) is life
        assert lived(Event.SHOW, Event.SUSPEND, life=life) is lived(Event.SUSPEND, life=life) is Life.SUSPENDED


def test_ranks_compare_w_again_whenever_it_may_have_changed() -> None:
    for event in (Event.START, Event.CHANGE, Event.LOAD, Event.SUSPEND, Event.RESET):
        assert {Life.STEPPING, Life.STEPPING_SHOWN}.isdisjoint(TABLE[event].values()), event


def test_every_state_is_reached_and_left() -> None:
    steps = {(life, following) for table in TABLE.values() for life, following in table.items()}
    reached = {Life.NEW}
    for _ in pairwise(Life):
        reached |= {following for life, following in steps if life in reached}
    assert reached == set(Life)
    assert {life for life, following in steps if life is not following} == set(Life)
