"""The dense allreduce: Horovod's own, or as a scheme beside the sparse ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import OptionError
from ..transport.base import Counts
from ..vectors.sparse import DenseVector, SparseVector, Values
from .algorithm import NOTHING, Algorithm, Step
from .base import Scheme
from .report import EVERYTHING, StepResult


class Dense:
    """Horovod's own dense allreduce, overlapped with the backward pass, behind the same argument; no options.

    Over MPI it is as fast as MPI's algorithm; `docs/benchmarks.md` says how to choose it.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=Dense())
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, _context: Any) -> Any:
        """Return the tensor itself."""
        return tensor


class DenseAllreduce(Algorithm):
    """u = Σ acc. A rank sends 2n(P-1)/P words."""

    _values: Values

    def select(self, step: Step) -> SparseVector:
        self._values = step.acc.values()
        return SparseVector.empty(step.acc.dtype)

    def counts(self, selected: SparseVector, n: int, size: int) -> Counts:  # noqa: ARG002
        return NOTHING

    def exchange(self, step: Step) -> StepResult:
        with step.phase("allreduce"):
            total = DenseVector(step.transport.allreduce(self._values))
        step.report.local_selected = step.report.global_selected = step.n
        return StepResult(total, EVERYTHING, step.report, selected=DenseVector(self._values))


@dataclass(frozen=True, eq=False)
class DenseSum(Scheme):
    """`Dense` under `Partial`: all elements are sent over our own transport, and nothing stays in the residual."""

    reduces = DenseAllreduce
    density: float = 1.0

    def with_density(self, density: float | None) -> NoReturn:
        """Raise OptionError: all elements are sent."""
        raise OptionError(f"Dense sends all elements, and has no density: set it for another scheme; got {density!r}")
