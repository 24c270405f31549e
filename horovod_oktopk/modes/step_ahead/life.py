"""The life of a model's parameters with StepAhead, on one rank: a pure table of states and events.

w are the parameters that all ranks share, p this rank's own. `docs/architecture.md` draws the table.
"""

from __future__ import annotations

from enum import Enum, auto


class Life(Enum):
    """A state: is there a w, have the ranks compared theirs, and does the model hold p or w?"""

    NEW = auto()
    """There is no w: the next step takes the model's parameters."""
    LOADED = auto()
    """A saved state waits for the next step, or for the end of `shared_parameters`."""
    SUSPENDED = auto()
    """The same with this rank's own state, as the ranks have changed or training has stopped; the model holds w."""
    STARTED = auto()
    """There is a w, which the ranks have not compared yet; the model holds p."""
    RESTORED = auto()
    """The same, and w - p is that of a saved state."""
    STEPPING = auto()
    """All ranks have the same w; the model holds p."""
    STARTED_SHOWN = auto()
    """STARTED, inside `shared_parameters`: the model holds w."""
    RESTORED_SHOWN = auto()
    STEPPING_SHOWN = auto()

    @property
    def is_started(self) -> bool:
        """True if there is a w."""
        return self not in (Life.NEW, Life.LOADED, Life.SUSPENDED)

    @property
    def is_shown(self) -> bool:
        """True if the model holds w, while there is a p."""
        return self in SHOWN.values()


class Event(Enum):
    """An event that leads from one state to the next."""

    START = auto()
    """The model's parameters become w; p = w - residual, if a saved state waits."""
    AGREE = auto()
    """The ranks have compared w: it is the same."""
    SHOW = auto()
    """w is put into the model."""
    HIDE = auto()
    """p is put back."""
    CHANGE = auto()
    """The program has changed w inside `shared_parameters`; the ranks are to compare it again."""
    LOAD = auto()
    """A saved state was given."""
    SUSPEND = auto()
    """This rank's unsent moves are put aside, and the model holds w."""
    RESET = auto()
    """The rank has become the only one, which needs no w."""


SHOWN = {Life.STARTED: Life.STARTED_SHOWN, Life.RESTORED: Life.RESTORED_SHOWN, Life.STEPPING: Life.STEPPING_SHOWN}
"""The state inside `shared_parameters`, by the one outside."""

TABLE: dict[Event, dict[Life, Life]] = {
    Event.START: {Life.NEW: Life.STARTED, Life.LOADED: Life.RESTORED, Life.SUSPENDED: Life.RESTORED,
                  Life.STARTED: Life.STARTED, Life.RESTORED: Life.STARTED},  # the rank has adopted rank 0's w
    Event.AGREE: dict.fromkeys([Life.STARTED, Life.RESTORED], Life.STEPPING),
    Event.SHOW: SHOWN,
    Event.HIDE: {shown: own for own, shown in SHOWN.items()},
    Event.CHANGE: {Life.STARTED_SHOWN: Life.STARTED_SHOWN, Life.RESTORED_SHOWN: Life.RESTORED_SHOWN,
                   Life.STEPPING_SHOWN: Life.STARTED_SHOWN},
    Event.LOAD: dict.fromkeys(Life, Life.LOADED),
    Event.SUSPEND: dict.fromkeys([*SHOWN, *SHOWN.values()], Life.SUSPENDED),
    Event.RESET: dict.fromkeys([Life.NEW, *SHOWN], Life.NEW),
}


def after(life: Life, event: Event) -> Life:
    """Return the state that follows. Raise KeyError for an event that cannot come in this state."""
    return TABLE[event][life]
