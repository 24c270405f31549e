"""What users write: `compression=OkTopk(density=0.01)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from numbers import Integral, Real
from typing import Any, NoReturn, get_args

from .core.oktopk import OkTopkAllreduce
from .errors import OptionError, PluginError
from .transport.base import TransportName


@dataclass(frozen=True, eq=False)
class Scheme:
    """What every scheme's options have in common; `OkTopk` is one. Options compare by identity."""

    density: float = 0.01
    k: int | None = None
    transport: TransportName = "auto"

    def __post_init__(self) -> None:
        _check_real("density", self.density, "in (0, 1]", lambda x: 0 < x <= 1)
        if self.k is not None:
            _check_integer("k", self.k)
            if self.density != type(self).density:
                raise OptionError(f"density and k exclude each other; got density={self.density!r}, k={self.k!r}")
        if self.transport not in get_args(TransportName):
            raise OptionError(f"transport must be one of {get_args(TransportName)}; got {self.transport!r}")

    def k_of(self, n: int) -> int:
        """The number of elements to select of n. Raises OptionError where k exceeds n."""
        if self.k is None:
            return max(1, round(self.density * n))
        if self.k > n:
            raise OptionError(f"k must be at most n, the number of gradient elements: got k={self.k}, n={n}")
        return self.k

    def settings(self) -> Mapping[str, Any]:
        """All options by name."""
        return asdict(self)

    def with_density(self, density: float) -> Scheme:
        """The same options with another density. Raises OptionError where k was given as a number."""
        if self.k is not None:
            raise OptionError(f"the density can be changed only where it was given; got k={self.k}")
        return replace(self, density=density)

    def scheme(self, description: str) -> OkTopkAllreduce:
        """The algorithm, with these options.

        description: what must be equal on all ranks, one "name: value" a line.
        """
        raise NotImplementedError

    # Horovod's Compressor interface. It is reached only where the plugin has no hold.

    def compress(self, _tensor: Any) -> NoReturn:
        """Refuses: a lone tensor cannot be compressed, and must not go dense."""
        raise PluginError(
            f"{type(self).__name__} acts inside hvd.DistributedOptimizer and hvd.DistributedGradientTape, after "
            "`import horovod_oktopk.torch` or `import horovod_oktopk.tensorflow`; "
            "hvd.allreduce(..., compression=...) and optimizers built without that import cannot use it")

    def decompress(self, tensor: Any, _context: Any) -> Any:
        """The tensor itself: reduced gradients arrive ready."""
        return tensor


def as_options(compression: Any) -> Scheme | None:
    """Options of ours (a plain class takes the defaults), or None for anything else."""
    if isinstance(compression, type) and issubclass(compression, Scheme):
        return compression()
    return compression if isinstance(compression, Scheme) else None


@dataclass(frozen=True, eq=False)
class OkTopk(Scheme):
    """Ok-Topk (Li and Hoefler, PPoPP 2022): u = Topk(Σ Topk(residual + gradient)) in at most 6k(P-1)/P words.

    density: fraction of the elements that a step selects, in (0, 1]; k = max(1, round(density * n)).
    k: that number itself, instead of a density; from 1 to n.
    threshold_interval: τ′, steps between exact evaluations of the thresholds. 1 selects exactly at every step.
    region_interval: τ, steps between repartitions of the regions.
    bucket_size: how many messages fly at once while what came before them is summed.
    balance_trigger: balance before the allgatherv where the largest block exceeds this multiple of the mean.
    threshold_guard: relative deviation from k past which a reused threshold is re-evaluated at once, in [0, 1).
    transport: "mpi" (mpi4py), "horovod" (Horovod's own alltoall and allgather), or "auto": MPI where
        Horovod runs on it, and Horovod's collectives elsewhere.
    Raises OptionError where a value is not allowed.
    """

    threshold_interval: int = 32
    region_interval: int = 64
    bucket_size: int = 8
    balance_trigger: float = 4.0
    threshold_guard: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold_interval", "region_interval", "bucket_size"):
            _check_integer(name, getattr(self, name))
        _check_real("balance_trigger", self.balance_trigger, "at least 1", lambda x: x >= 1)
        _check_real("threshold_guard", self.threshold_guard, "in [0, 1)", lambda x: 0 <= x < 1)

    def scheme(self, description: str) -> OkTopkAllreduce:
        """The algorithm, with these options; description: see OkTopkAllreduce."""
        return OkTopkAllreduce(description, self.threshold_interval, self.region_interval, self.bucket_size,
                               self.balance_trigger, self.threshold_guard)


def _check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name} must be an integer of at least 1; got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise OptionError(f"{name} must be an integer of at least 1; got {value!r}")


def _check_real(name: str, value: Any, allowed: str, is_allowed: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} must be a number {allowed}; got {value!r} of type {type(value).__name__}")
    if not isfinite(value) or not is_allowed(value):
        raise OptionError(f"{name} must be {allowed}; got {value!r}")
