"""The density of each epoch: more in the first ones, as gTop-k has it (Shi et al., ICDCS 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

from .errors import OptionError

GTOPK_DENSITIES = (0.25, 0.0725, 0.015, 0.004)
"""Densities of gTop-k for the first four epochs; its final density is 0.1 %."""

Schedule = Sequence[float] | Callable[[int], float | None]
"""Densities of the first epochs; or a function from the epoch (from 0) to a density, or to None for the final one.

1.0 selects all elements.
"""


def density_of_epoch(schedule: Schedule = GTOPK_DENSITIES) -> Callable[[int], float | None]:
    """Return a function from the epoch (from 0) to its density, or to None for the final density.

    Raise OptionError for a bad sequence. If `schedule` is a function, the returned function raises OptionError for a
    bad result.
    """
    if callable(schedule):
        return _checked(schedule)
    if not isinstance(schedule, Sequence) or isinstance(schedule, str | bytes) or not schedule:
        raise OptionError("schedule must be a sequence of at least one density, or a function of the epoch; "
                          f"got {schedule!r} of type {type(schedule).__name__}")
    for epoch, density in enumerate(schedule):
        _check_density(f"schedule: the density of epoch {epoch}", density)
    return dict(enumerate(schedule)).get


def check_epoch(epoch: int) -> int:
    """Return the epoch. Raise OptionError if it is not an integer of at least 0."""
    if isinstance(epoch, bool) or not isinstance(epoch, Integral) or epoch < 0:
        raise OptionError(f"epoch must be an integer of at least 0; got {epoch!r} of type {type(epoch).__name__}")
    return int(epoch)


def _checked(schedule: Callable[[int], float | None]) -> Callable[[int], float | None]:
    def density_of(epoch: int) -> float | None:
        density = schedule(epoch)
        if density is not None:
            _check_density(f"schedule: what the function gives for epoch {epoch}", density)
        return density

    return density_of


def _check_density(what: str, density: Any) -> None:
    # A NaN fails the comparison as well.
    if isinstance(density, bool) or not isinstance(density, Real) or not 0 < float(density) <= 1:
        raise OptionError(f"{what} must be a number in (0, 1]; got {density!r} of type {type(density).__name__}")
