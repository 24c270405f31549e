"""The mode of a user's options: where the core tells modes apart; integrations have a table of runs for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..schemes.options import Scheme
from ..selection.accumulator import ResidualAccumulator
from ..selection.parameter_accumulator import ParameterAccumulator
from ..selection.replica import Replica
from ..transport.ranks import Ranks
from ..vectors.layout import Layout
from .gradient_mode import GradientMode
from .mode import Mode
from .options import Partial, StepAhead
from .partial.mode import PartialMode
from .step_ahead.mode import StepAheadMode

Kind = type[Mode[Any]]


def kind_of(options: Any) -> Kind:
    """Return the class of the options' mode."""
    kinds: dict[type, Kind] = {StepAhead: StepAheadMode, Partial: PartialMode}
    return kinds.get(type(options), GradientMode)


def with_scheme(options: Any, scheme: Scheme) -> Any:
    """Return the same options with another scheme."""
    return scheme if isinstance(options, Scheme) else replace(options, inner=scheme)


def make_mode(options: Any, average: bool, layout: Layout, ranks: Ranks,
              of_gradients: Callable[[], ResidualAccumulator],
              of_parameters: Callable[[], tuple[ParameterAccumulator, Replica]], *, normalizes: bool = False,
              settings: Sequence[str] = (), signature: Sequence[str] | None = None) -> Mode[Any]:
    """Return the mode of these options on this rank.

    `of_gradients` makes the accumulator of the gradients, `of_parameters` that of the parameters and the replica
    that gives access to them. `settings` names the settings, such as the learning rate, that are sent with each
    round. The classes of the modes describe the other arguments.
    """
    if isinstance(options, StepAhead):
        return StepAheadMode(options, average, layout, *of_parameters(), ranks, normalizes)
    if isinstance(options, Partial):
        return PartialMode(options, average, layout, of_gradients, ranks, settings)
    return GradientMode(options, average, layout, of_gradients, ranks, signature)
