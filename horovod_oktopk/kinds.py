"""The mode of a user's options: the one place that tells modes apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .partial.options import Partial
from .partial.reducer import PartialReducer
from .reducer.flat import FlatReducer
from .reducer.layout import L
from .reducer.mode import Mode
from .schemes.base import Scheme
from .selection.accumulator import ResidualAccumulator
from .selection.parameter_accumulator import ParameterAccumulator
from .step_ahead.options import StepAhead
from .step_ahead.reducer import StepAheadReducer
from .step_ahead.replica import Replica
from .transport.ranks import Ranks


def kind_of(options: Any) -> type[Mode]:
    """Return the class of the options' mode."""
    kinds: dict[type, type[Mode]] = {StepAhead: StepAheadReducer, Partial: PartialReducer}
    return kinds.get(type(options), FlatReducer)


def with_scheme(options: Any, scheme: Scheme) -> Any:
    """Return the same options with another scheme."""
    return scheme if isinstance(options, Scheme) else replace(options, inner=scheme)


def make_mode(options: Any, average: bool, layout: L, ranks: Ranks,
              of_gradients: Callable[[L], ResidualAccumulator],
              of_parameters: Callable[[], tuple[ParameterAccumulator, Replica]], *, normalizes: bool = False,
              settings: Sequence[str] = (), signature: Sequence[str] | None = None) -> Mode:
    """Return the mode of these options on this rank.

    of_gradients: makes the accumulator of a layout's gradients. of_parameters: makes that of the parameters, and the
    parameters themselves. settings: names of the numbers that travel with rounds. For the others see the modes.
    """
    if isinstance(options, StepAhead):
        return StepAheadReducer(options, average, layout, *of_parameters(), ranks, normalizes)
    if isinstance(options, Partial):
        return PartialReducer(options, average, layout, of_gradients, ranks, settings)
    return FlatReducer(options, average, layout, of_gradients, ranks, signature)
