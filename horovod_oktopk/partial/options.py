"""What users write: `compression=Partial(OkTopk(density=0.01))`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from ..errors import OptionError
from ..schemes.base import Compression, Scheme, check_integer, check_real
from ..schemes.dense import Dense, DenseSum
from ..schemes.oktopk import OkTopk
from .rounds import Policy

NEEDS_MPI = ("Partial needs MPI (horovodrun --mpi): its rounds run without the help of ranks that are late, and "
             "Horovod's own collectives wait for everyone")


@dataclass(frozen=True, eq=False)
class Partial(Compression):
    """Eager-SGD (Li et al., PPoPP 2020): a step does not wait for the slowest rank; needs MPI.

    Rounds of reduction run without the ranks that are late. What those have computed joins their next contribution,
    and every rank applies every round's update, in order, so that replicas that have seen the same rounds are equal.

    inner: what a round runs: Dense(), OkTopk(...) or another scheme, in one bucket.
    policy: "solo": whoever comes first starts a round; "majority": a rank that is drawn anew for each, so that half
        of the ranks, on average, have come.
    seed: of the draws.
    max_staleness: how many rounds may run that a rank has not seen; then they wait for it. A rank keeps their
        updates until it comes: of OkTopk 2k words each, of Dense n.
    timeout: seconds after which that fails, on all ranks, and after which a round starts without the drawn rank.
    model_sync_interval: None, or the paper's way: a late rank applies the latest round's update alone, replicas
        drift apart, and are averaged every so many of a rank's own steps.
    Raises OptionError where a value is not allowed.
    """

    inner: Scheme | Any = field(default_factory=OkTopk)
    policy: Policy = "majority"
    seed: int = 0
    max_staleness: int = 16
    timeout: float = 600.0
    model_sync_interval: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise OptionError(f"policy must be one of {get_args(Policy)}; got {self.policy!r}")
        check_integer("seed", self.seed, least=0)
        check_integer("max_staleness", self.max_staleness)
        check_real("timeout", self.timeout, "above 0", lambda x: x > 0)
        if self.model_sync_interval is not None:
            check_integer("model_sync_interval", self.model_sync_interval)
        scheme = _inner_scheme(self.inner)
        if scheme.bucket_bytes is not None:
            raise OptionError("Partial reduces all gradients in one bucket; got an inner scheme with "
                              f"bucket_bytes={scheme.bucket_bytes!r}")
        if scheme.transport == "horovod":
            raise OptionError(f"{NEEDS_MPI}; got an inner scheme with transport='horovod'")
        object.__setattr__(self, "inner", scheme)

    def settings(self) -> Mapping[str, Any]:
        """Its own options by name, without the scheme's."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "inner"}


def as_options(compression: Any) -> Scheme | Partial | None:
    """Options of ours (a plain class takes the defaults), or None for anything else."""
    if isinstance(compression, type) and issubclass(compression, Scheme | Partial):
        return compression()
    return compression if isinstance(compression, Scheme | Partial) else None


def _inner_scheme(inner: Any) -> Scheme:
    """What a round of Partial runs. Raises OptionError for what is none of ours."""
    if isinstance(inner, Dense) or inner is Dense:
        return DenseSum()
    scheme = as_options(inner)
    if not isinstance(scheme, Scheme):
        raise OptionError(f"Partial takes Dense(), OkTopk(...) or another scheme; got {inner!r}")
    return scheme
