"""Which reducer serves an optimizer: the one thing that all of this integration's modules need to know."""

from __future__ import annotations

from typing import Any

from .reducer import Reducer
from .step_ahead import StepAheadReducer

AnyReducer = Reducer | StepAheadReducer

_ATTRIBUTE = "_oktopk_reducer"


def register(optimizer: Any, reducer: AnyReducer) -> None:
    """Makes the reducer the optimizer's."""
    setattr(optimizer, _ATTRIBUTE, reducer)


def reducer_of(optimizer: Any) -> AnyReducer | None:
    """The reducer of an optimizer of ours, also inside a library's wrapper (Accelerate's); None for any other."""
    reducer: AnyReducer | None = getattr(optimizer, _ATTRIBUTE, None)
    inner = getattr(optimizer, "optimizer", None)
    return reducer_of(inner) if reducer is None and inner is not None else reducer


def gradient_reducer_of(optimizer: Any) -> Reducer | None:
    """The same, if it reduces gradients; None with StepAhead, which leaves them alone."""
    reducer = reducer_of(optimizer)
    return reducer if isinstance(reducer, Reducer) else None
