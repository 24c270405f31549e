"""The base of all schemes' options, which users write as `compression=`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NoReturn, Self, get_args

from ..errors import OptionError, PluginError
from ..transport.ranks import Hierarchical, TransportName
from .algorithm import Algorithm

DEFAULT_DENSITY = 0.01
DENSITIES = (*(DEFAULT_DENSITY * 2 ** (number / 2) for number in range(11)), 1.0)
"""Densities of a search. Between a third and all, elements with their indices cost as much as all without."""
Unit = Literal["gradients", "parameters"]
"""The unit of the reduced vectors: gradients, or in StepAhead moves of parameters."""

class Compression:
    """Horovod's Compressor interface. Horovod calls its methods only where the plugin has not wrapped it."""

    @staticmethod
    def compress(*_: Any) -> NoReturn:
        """Raise PluginError: a lone tensor cannot be compressed, and must not go dense."""
        raise PluginError(
            "hvd.allreduce takes no compression of horovod_oktopk; hvd.DistributedOptimizer and "
            "hvd.DistributedGradientTape do, once this process has imported horovod_oktopk.torch or "
            "horovod_oktopk.tensorflow: import it before `from horovod.torch import DistributedOptimizer`, and "
            "inside a function that other processes run (horovod.run, Ray, Spark)")

    def decompress(self, tensor: Any, _context: Any) -> Any:
        """Return the tensor itself: reduced gradients arrive ready."""
        return tensor


FEW_WORKERS = 8
"""Number of workers up to which each rank's own noise is small, in units of a step of all ranks."""
OVERSHOOT = 0.4
"""Times what a rank's element differs by from the mean: about what momentum (0.9) adds until it is sent again.

A rank's own noise is in its momentum, which goes on pushing p away from w after an exchange has brought it back. So p
is moved past w, to where it is near w on average until the next exchange. The ranks' mean p does not move by it.
"""


@dataclass(frozen=True, eq=False)
class Scheme(Compression):
    """The options of a scheme. Options compare by identity.

    The options density, transport and hierarchical are explained in `OkTopk`.

    Raises:
        OptionError: A value is not allowed.
    """

    reduces: ClassVar[type[Algorithm]]
    """The algorithm, if it has no options."""
    densities: ClassVar[tuple[float, ...]] = DENSITIES
    """The densities that `density="auto"` tries, the least first."""

    density: float | Literal["auto"] = DEFAULT_DENSITY
    transport: TransportName = "auto"
    hierarchical: Hierarchical = False
    measures: bool = field(init=False, repr=False)
    """True if the density follows what steps take; see `modes/auto_density.py`."""
    present_density: float = field(init=False, repr=False)
    """The fraction that is selected now."""
    _given_density: float | Literal["auto"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set(measures=is_auto(self.density), _given_density=self.density)
        if not self.measures:
            check_real("density", self.density, 'in (0, 1], or "auto"', lambda x: 0 < x <= 1)
        self._set(present_density=self._first_density)
        if self.measures and self.hierarchical:
            raise OptionError("density must be a number where a host is one worker; got density='auto' and "
                              f"hierarchical={self.hierarchical!r}")
        if not isinstance(self.hierarchical, bool):
            check_integer("hierarchical", self.hierarchical, ", or True or False")
        if self.transport not in get_args(TransportName):
            raise OptionError(f"transport must be one of {get_args(TransportName)}; got {self.transport!r}")

    def k_of(self, n: int) -> int:
        """Return the number of elements to select of n."""
        return elements(self.present_density, n)

    def settings(self, unit: Unit = "gradients") -> Mapping[str, Any]:  # noqa: ARG002
        """Return all options by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def settings_but_density(self) -> Mapping[str, Any]:
        """Return the options that a change of the density leaves unchanged, by name."""
        return {name: value for name, value in self.settings().items() if name != "density"} | {
            "measures": self.measures}

    def with_density(self, density: float | Literal["auto"] | None) -> Self:
        """Return the same options with another density.

        None: the density that was given at first, however often it has changed.
        """
        changed = replace(self, density=self._given_density if density is None else density)
        changed._set(_given_density=self._given_density)
        return changed

    def at(self, density: float) -> Self:
        """Return the same options at a density that was found by measuring."""
        changed = self.with_density("auto")
        changed._set(present_density=density)
        return changed

    @property
    def _first_density(self) -> float:
        """The density that was given; the least if it is measured."""
        return self.densities[0] if isinstance(self._given_density, str) else self._given_density

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def coefficient(self, workers: int, normalizes: bool, overlap: bool) -> float:  # noqa: ARG002
        """Return the λ that suits the scheme in `StepAhead`, among so many workers.

        If the optimizer normalizes its gradients, noise makes a rank's steps no shorter, and more of w - p is noise.
        """
        return 1 / math.sqrt(workers) if normalizes else 1 / math.sqrt(math.sqrt(workers))

    def overshoot_of_p(self, workers: int) -> float:  # noqa: ARG002
        """Return how far an exchange moves p past w in `StepAhead`, unless all elements are sent.

        The unit is what a rank contributed to the exchange, less the workers' mean of that.
        """
        return 0.0

    def algorithm(self, unit: Unit = "gradients") -> Algorithm:  # noqa: ARG002
        """Return the algorithm with these options."""
        return self.reduces()


def elements(density: float, n: int) -> int:
    """Return max(1, round(density · n))."""
    return max(1, round(float(density) * n))  # float16 would overflow


def is_auto(value: Any) -> bool:
    """Return True for "auto"; an array, which a user has given by mistake, is none."""
    return isinstance(value, str) and value == "auto"


def check_integer(name: str, value: Any, otherwise: str = "", least: int = 1) -> None:
    """Raise OptionError if the value is no integer of at least `least`; `otherwise` says what else is allowed."""
    allowed = f"an integer of at least {least}{otherwise}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name} must be {allowed}; got {value!r} of type {type(value).__name__}")
    if value < least:
        raise OptionError(f"{name} must be {allowed}; got {value!r}")


def check_real(name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """Raise OptionError if the value is no finite number, or not allowed; `allowed` says in words which are."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} must be a number {allowed}; got {value!r} of type {type(value).__name__}")
    if not _is_finite(value) or not is_allowed(value):
        raise OptionError(f"{name} must be {allowed}; got {value!r}")


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float comes near
        return False
