"""Which reducer serves an optimizer: the one thing that all of this integration's modules need to know."""

from __future__ import annotations

from typing import Any

from .reducer import Reducer

_ATTRIBUTE = "_oktopk_reducer"


def register(optimizer: Any, reducer: Reducer) -> None:
    """Makes the reducer the optimizer's."""
    setattr(optimizer, _ATTRIBUTE, reducer)


def reducer_of(optimizer: Any) -> Reducer | None:
    """The reducer of an optimizer of ours; None for any other."""
    reducer: Reducer | None = getattr(optimizer, _ATTRIBUTE, None)
    return reducer
