"""What users write: `compression=OkTopk(density=0.01)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, Protocol, get_args, overload

from .errors import OptionError, PluginError
from .kernels.half_precision import HalfDtype
from .partial.states import Policy
from .schemes.auto import AutoAllreduce
from .schemes.dense import DenseAllreduce
from .schemes.gaussiank import GaussianKAllreduce
from .schemes.gtopk import GTopkAllreduce, NaiveGTopkAllreduce
from .schemes.oktopk import OkTopkAllreduce, Selection
from .schemes.step_result import StepResult
from .schemes.topka import TopkAAllreduce
from .schemes.topkdsa import TopkDSAAllreduce
from .selection.accumulator import Accumulator
from .transport.base import TransportName
from .transport.counting import CountingTransport

DEFAULT_DENSITY = 0.01


class Algorithm(Protocol):
    """What every scheme's algorithm offers; see OkTopkAllreduce."""

    description: str
    step: int

    def reduce(self, acc: Accumulator, k: int, finite: bool, transport: CountingTransport) -> StepResult: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def forget(self) -> None: ...


class Compression:
    """Horovod's Compressor interface. Its methods are reached only where the plugin has no hold."""

    def compress(self, _tensor: Any) -> NoReturn:
        """Refuses: a lone tensor cannot be compressed, and must not go dense."""
        raise PluginError(
            f"{type(self).__name__} acts inside hvd.DistributedOptimizer and hvd.DistributedGradientTape, after "
            "`import horovod_oktopk.torch` or `import horovod_oktopk.tensorflow`; "
            "hvd.allreduce(..., compression=...) and optimizers built without that import cannot use it")

    def decompress(self, tensor: Any, _context: Any) -> Any:
        """The tensor itself: reduced gradients arrive ready."""
        return tensor


@dataclass(frozen=True, eq=False)
class Scheme(Compression):
    """What every scheme's options have in common. Options compare by identity.

    density: fraction of the elements that a step selects, in (0, 1]; k = max(1, round(density * n)). 0.01, if
        neither it nor k is given; None, if k is.
    k: that number itself, instead of a density; from 1 to n.
    transport: "mpi" (mpi4py), "horovod" (Horovod's own alltoall and allgather), or "auto": MPI where
        Horovod runs on it, and Horovod's collectives elsewhere.
    bucket_bytes: the gradients are split into buckets of about so many bytes, the last ones first, and a bucket is
        reduced while the backward pass still computes the next; each has a k of its own, by the density. "auto" (in
        PyTorch): buckets are planned over the first steps, and taken where they are faster. None: one bucket, after
        the backward pass.
    Raises OptionError where a value is not allowed.
    """

    density: float | None = None
    k: int | None = None
    transport: TransportName = "auto"
    bucket_bytes: int | Literal["auto"] | None = None
    _given_density: float | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.density is None and self.k is None:
            object.__setattr__(self, "density", DEFAULT_DENSITY)
        object.__setattr__(self, "_given_density", self.density)
        if self.density is not None:
            _check_real("density", self.density, "in (0, 1]", lambda x: 0 < x <= 1)
        if self.k is not None:
            _check_integer("k", self.k)
            if self.density is not None:
                raise OptionError(f"density and k exclude each other; got density={self.density!r}, k={self.k!r}")
        if self.bucket_bytes is not None:
            if self.bucket_bytes != "auto":
                _check_integer("bucket_bytes", self.bucket_bytes, ', or "auto"')
            if self.k is not None:
                raise OptionError("bucket_bytes splits the gradients into buckets, each with a k of its own: give a "
                                  f"density; got k={self.k!r}, bucket_bytes={self.bucket_bytes!r}")
        if self.transport not in get_args(TransportName):
            raise OptionError(f"transport must be one of {get_args(TransportName)}; got {self.transport!r}")

    def k_of(self, n: int) -> int:
        """The number of elements to select of n. Raises OptionError where k exceeds n."""
        if self.k is None:
            assert self.density is not None
            return max(1, round(self.density * n))
        if self.k > n:
            raise OptionError(f"k must be at most n, the number of gradient elements: got k={self.k}, n={n}")
        return self.k

    def settings(self) -> Mapping[str, Any]:
        """All options by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def with_density(self, density: float | None) -> Scheme:
        """The same options with another density; None: that which was given at first, however often it has changed.

        Raises OptionError where k was given as a number.
        """
        if self.k is not None:
            raise OptionError(f"the density can be changed only where it was given; got k={self.k}")
        changed = replace(self, density=self._given_density if density is None else density)
        object.__setattr__(changed, "_given_density", self._given_density)
        return changed

    def build(self, description: str) -> Algorithm:
        """The algorithm, with these options.

        description: what must be equal on all ranks, one "name: value" a line.
        """
        raise NotImplementedError


class Dense:
    """Horovod's own dense allreduce, overlapped with the backward pass, behind the same argument; no options.

    Over MPI it is as fast as MPI's algorithm; `docs/benchmarks.md` says how to choose it.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, _context: Any) -> Any:
        """The tensor itself."""
        return tensor


def as_options(compression: Any) -> Scheme | Partial | None:
    """Options of ours (a plain class takes the defaults), or None for anything else."""
    if isinstance(compression, type) and issubclass(compression, Scheme | Partial):
        return compression()
    return compression if isinstance(compression, Scheme | Partial) else None


@dataclass(frozen=True, eq=False)
class OkTopk(Scheme):
    """Ok-Topk (Li and Hoefler, PPoPP 2022): u = Topk(Σ Topk(residual + gradient)) in at most 6k(P-1)/P words.

    density: fraction of the elements that a step selects, in (0, 1]; k = max(1, round(density * n)). 0.01, if
        neither it nor k is given; None, if k is.
    k: that number itself, instead of a density; from 1 to n.
    selection: "exact": the global top-k is exact at every step, as the local one always is; "reuse": the paper's,
        which reuses the global threshold between evaluations, and saves one short message.
    strategy: "split": Ok-Topk's own; "auto": over the first steps Ok-Topk, an allgather of everyone's top-k with the
        same outcome, and a dense allreduce are timed, and the fastest is taken; for small models and fast networks.
    value_dtype: "float16" or "bfloat16": values travel in 16 bits, and what rounding leaves over stays in the
        residual; None: they travel as they are. float16 holds magnitudes of about 6e-5 to 65504 well.
    threshold_interval: τ′, steps between exact evaluations of the global threshold, where it is reused.
    region_interval: τ, steps between repartitions of the regions.
    messages_in_flight: how many messages fly at once while what came before them is decoded.
    balance_trigger: balance before the allgatherv where the largest block exceeds this multiple of the mean.
    threshold_guard: relative deviation from k past which a reused global threshold is replaced, in [0, 1).
    transport: "mpi" (mpi4py), "horovod" (Horovod's own alltoall and allgather), or "auto": MPI where
        Horovod runs on it, and Horovod's collectives elsewhere.
    bucket_bytes: the gradients are split into buckets of about so many bytes, the last ones first, and a bucket is
        reduced while the backward pass still computes the next; each has a k of its own, by the density. "auto" (in
        PyTorch): buckets are planned over the first steps, and taken where they are faster. None: one bucket, after
        the backward pass.
    Raises OptionError where a value is not allowed.
    """

    selection: Selection = "exact"
    strategy: Literal["split", "auto"] = "split"
    value_dtype: HalfDtype | None = None
    threshold_interval: int = 32
    region_interval: int = 64
    messages_in_flight: int = 8
    balance_trigger: float = 4.0
    threshold_guard: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("selection", get_args(Selection)), ("strategy", ("split", "auto")),
                              ("value_dtype", (None, *get_args(HalfDtype)))):
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")
        for name in ("threshold_interval", "region_interval", "messages_in_flight"):
            _check_integer(name, getattr(self, name))
        _check_real("balance_trigger", self.balance_trigger, "at least 1", lambda x: x >= 1)
        _check_real("threshold_guard", self.threshold_guard, "in [0, 1)", lambda x: 0 <= x < 1)

    def build(self, description: str) -> OkTopkAllreduce:
        """The algorithm, with these options; description: see OkTopkAllreduce."""
        kind = AutoAllreduce if self.strategy == "auto" else OkTopkAllreduce
        return kind(description, self.selection, self.value_dtype, self.threshold_interval, self.region_interval,
                    self.messages_in_flight, self.balance_trigger, self.threshold_guard)


@dataclass(frozen=True, eq=False)
class TopkA(Scheme):
    """Everyone gathers everyone's top-k: u = Σ Topk(residual + gradient), in 2k(P-1) words; see Scheme."""

    def build(self, description: str) -> TopkAAllreduce:
        """The algorithm, with these options."""
        return TopkAAllreduce(description)


@dataclass(frozen=True, eq=False)
class TopkDSA(Scheme):
    """SparCML (Renggli et al., SC 2019): u = Σ Topk(residual + gradient), summed by regions, sparse or dense.

    It sends 4k(P-1)/P to (2k + n)(P-1)/P words, by how far the ranks' selections differ.
    messages_in_flight: how many messages fly at once while what came before them is decoded. The rest: see Scheme.
    """

    messages_in_flight: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_integer("messages_in_flight", self.messages_in_flight)

    def build(self, description: str) -> TopkDSAAllreduce:
        """The algorithm, with these options."""
        return TopkDSAAllreduce(description, self.messages_in_flight)


@dataclass(frozen=True, eq=False)
class GTopk(Scheme):
    """gTop-k (Shi et al., ICDCS 2019): the top-k of sums, merged along a tree; its root sends and receives
    4k⌈log2 P⌉ words.

    collective: "tree" (Algorithm 4), or "allgather" (Algorithm 2, the naive one), in 2k(P-1) words. The rest: see
        Scheme.
    """

    collective: Literal["tree", "allgather"] = "tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collective not in ("tree", "allgather"):
            raise OptionError(f"collective must be 'tree' or 'allgather'; got {self.collective!r}")

    def build(self, description: str) -> GTopkAllreduce | NaiveGTopkAllreduce:
        """The algorithm, with these options."""
        return (GTopkAllreduce if self.collective == "tree" else NaiveGTopkAllreduce)(description)


@dataclass(frozen=True, eq=False)
class GaussianK(Scheme):
    """Gaussiank (Shi et al., 2019): TopkA with a threshold estimated from mean and deviation; see Scheme.

    The threshold is lowered until more than 3k/4 elements pass; of more than k, the k largest are sent.
    """

    def build(self, description: str) -> GaussianKAllreduce:
        """The algorithm, with these options."""
        return GaussianKAllreduce(description)


@dataclass(frozen=True, eq=False)
class DenseSum(Scheme):
    """`Dense` under `Partial`: all elements are sent over our own transport, and nothing stays in the residual."""

    density: float | None = 1.0

    def with_density(self, density: float | None) -> NoReturn:
        """Refuses."""
        raise OptionError(f"Dense sends all elements, and has no density; got {density!r}")

    def build(self, description: str) -> DenseAllreduce:
        """The algorithm."""
        return DenseAllreduce(description)


class _Inner:
    """Partial's first field: it takes what users write, and gives the scheme that a round runs."""

    @overload
    def __get__(self, options: None, _owner: type[Partial]) -> type[OkTopk]: ...

    @overload
    def __get__(self, options: Partial, _owner: type[Partial]) -> Scheme: ...

    def __get__(self, options: Partial | None, _owner: type[Partial]) -> Scheme | type[OkTopk]:
        if options is None:  # the field's default
            return OkTopk
        scheme: Scheme = options.__dict__["inner"]
        return scheme

    def __set__(self, options: Partial, inner: Scheme | Dense | type[Scheme | Dense]) -> None:
        options.__dict__["inner"] = _inner_scheme(inner)


@dataclass(frozen=True, eq=False)
class Partial(Compression):
    """Eager-SGD (Li et al., PPoPP 2020): a step does not wait for the slowest rank; needs MPI.

    Rounds of reduction run without the ranks that are late. What those have computed joins their next contribution,
    and every rank applies every round's update, in order, so that replicas that have seen the same rounds are equal.

    inner: what a round runs: Dense(), OkTopk(...) or another scheme, in one bucket; a class takes its defaults.
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

    inner: _Inner = _Inner()
    policy: Policy = "majority"
    seed: int = 0
    max_staleness: int = 16
    timeout: float = 600.0
    model_sync_interval: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise OptionError(f"policy must be one of {get_args(Policy)}; got {self.policy!r}")
        _check_integer("seed", self.seed, least=0)
        _check_integer("max_staleness", self.max_staleness)
        _check_real("timeout", self.timeout, "above 0", lambda x: x > 0)
        if self.model_sync_interval is not None:
            _check_integer("model_sync_interval", self.model_sync_interval)
        if self.inner.bucket_bytes is not None:
            raise OptionError("Partial reduces all gradients in one bucket; got an inner scheme with "
                              f"bucket_bytes={self.inner.bucket_bytes!r}")
        if self.inner.transport == "horovod":
            raise OptionError(f"{NEEDS_MPI}; got an inner scheme with transport='horovod'")

    def settings(self) -> Mapping[str, Any]:
        """Its own options by name, without the scheme's."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "inner"}


NEEDS_MPI = ("Partial needs MPI (horovodrun --mpi): its rounds run without the help of ranks that are late, and "
             "Horovod's own collectives wait for everyone")


def _check_integer(name: str, value: Any, otherwise: str = "", least: int = 1) -> None:
    allowed = f"an integer of at least {least}{otherwise}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name} must be {allowed}; got {value!r} of type {type(value).__name__}")
    if value < least:
        raise OptionError(f"{name} must be {allowed}; got {value!r}")


def _check_real(name: str, value: Any, allowed: str, is_allowed: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} must be a number {allowed}; got {value!r} of type {type(value).__name__}")
    if not isfinite(value) or not is_allowed(value):
        raise OptionError(f"{name} must be {allowed}; got {value!r}")


def _inner_scheme(inner: Any) -> Scheme:
    """What a round of Partial runs. Raises OptionError for what is none of ours."""
    if isinstance(inner, Dense) or inner is Dense:
        return DenseSum()
    scheme = as_options(inner)
    if not isinstance(scheme, Scheme):
        raise OptionError(f"Partial takes Dense(), OkTopk(...) or another scheme; got {inner!r}")
    return scheme
