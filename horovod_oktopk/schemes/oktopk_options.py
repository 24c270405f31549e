"""The options of Ok-Topk, which users write as `compression=OkTopk(...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from ..errors import OptionError
from ..vectors.wire import ValueDtype
from .oktopk import OkTopkAllreduce
from .options import FEW, OVERSHOOT, Scheme, Unit, check_integer, check_real, elements

GlobalSelection = Literal["exact", "reuse"]
KEPT_OF_PARAMETERS = 32
"""Elements kept of the sum in StepAhead by default, as a multiple of a rank's selection."""


@dataclass(frozen=True, eq=False)
class OkTopk(Scheme):
    """Ok-Topk (Li and Hoefler, PPoPP 2022): u = Topk(Σ Topk(residual + gradient)) in at most 6k(P−1)/P words.

    Args:
        density: fraction of the elements that a rank selects at a step, in (0, 1]: k = max(1, round(density · n)),
            over all parameters together. `"auto"`: the largest whose steps take at most 5 % longer than those of
            density 1 %, found by measuring while training goes on; bits then depend on time.
        global_density: fraction of the elements that is kept of the sum, in (0, 1]: k′ = max(1,
            round(global_density · n)), and at most P·k. None: as many as each rank selects. 1.0: all that was sent,
            without a global selection. `"auto"`: in `StepAhead` all that up to 32 ranks select, elsewhere as many as
            each. More is better for accuracy, above all on many ranks, and costs words: at most (2k + 4k′)(P−1)/P if
            k′ ≥ k. If the density is changed later, k′ keeps its ratio to k.
        selection: `"exact"`: the global top-k is exact at every step, as the local one always is. `"reuse"`: the
            paper's way, which reuses the global threshold between evaluations, and saves one short message.
        value_dtype: `"bfloat16"`: values travel in 16 bits. `"log4"`: in 4, a sign and one of eight magnitudes. None:
            unchanged. `"auto"`: in `StepAhead` `"log4"`, elsewhere unchanged. Rounding errors stay in the residual.
        threshold_interval: τ′, steps between exact evaluations of the global threshold, if it is reused.
        region_interval: τ, steps between repartitions of the index space.
        transport: `"mpi"` (mpi4py), `"horovod"` (Horovod's own alltoall and allgather), or `"auto"`: MPI if Horovod
            runs on it, and Horovod's collectives if not.
        hierarchical: True: each host is one worker. Its ranks add up their gradients, keep a slice of the residual
            each, and send the selected elements once; every host needs as many ranks. A number: that many consecutive
            ranks count as a host. False: each rank is a worker.

    Raises:
        OptionError: A value is not allowed.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=OkTopk(density=0.01))
    """

    selection: GlobalSelection = "exact"
    global_density: float | Literal["auto"] | None = "auto"
    value_dtype: ValueDtype | Literal["auto"] | None = "auto"
    threshold_interval: int = 32
    region_interval: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("selection", get_args(GlobalSelection)),
                              ("value_dtype", (None, "auto", *get_args(ValueDtype)))):
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")
        if self.global_density not in (None, "auto"):
            check_real("global_density", self.global_density, 'in (0, 1], None or "auto"', lambda x: 0 < x <= 1)
        for name in ("threshold_interval", "region_interval"):
            check_integer(name, getattr(self, name))

    def wire_dtype(self, unit: Unit = "gradients") -> ValueDtype | None:
        """Return the format of the values that are sent; None: their own dtype."""
        if self.value_dtype == "auto":
            return "log4" if unit == "parameters" else None
        return self.value_dtype

    def global_k_of(self, k: int, n: int, size: int, unit: Unit = "gradients") -> int:
        """Return k', the number of elements to keep of the sum, if each of `size` ranks selects k of n."""
        kept, given = self._given_global_density, self._first_density
        if kept is None:
            wanted = self._default_multiple(unit) * k
        elif k == elements(given, n):
            wanted = elements(kept, n)
        else:  # the density has changed
            wanted = elements(kept / given, k)
        return min(wanted, n, k * size)

    @property
    def _given_global_density(self) -> float | None:
        """The global density that was given; None if it is a multiple of the density."""
        return None if self.global_density is None or self.global_density == "auto" else float(self.global_density)

    def _default_multiple(self, unit: Unit) -> int:
        return KEPT_OF_PARAMETERS if self.global_density == "auto" and unit == "parameters" else 1

    def settings(self, unit: Unit = "gradients") -> Mapping[str, Any]:
        """Return all options by name; a global density with its original density, as k' follows from both."""
        kept = self._given_global_density
        said = (f"{self._default_multiple(unit)} times the density" if kept is None
                else f"{kept} at density {self._given_density}")
        return {**super().settings(unit), "global_density": said, "value_dtype": self.wire_dtype(unit)}

    def kind(self) -> Mapping[str, Any]:
        """Return the options that a change of the density leaves unchanged; a global density as a multiple of it."""
        kept = self._given_global_density
        if kept is None:
            return super().kind()
        return {**super().kind(), "global_density": f"{kept / self._first_density:.6g} times the density"}

    def overshoot_of_p(self, workers: int) -> float:
        """Return 0 for a few workers, with whom it gains nothing."""
        return OVERSHOOT if workers > FEW else 0.0

    def algorithm(self, unit: Unit = "gradients") -> OkTopkAllreduce:
        """Return the algorithm with these options."""
        return OkTopkAllreduce(partial(self.global_k_of, unit=unit), self.wire_dtype(unit), self.selection == "reuse",
                               self.threshold_interval, self.region_interval)
