"""The dense allreduce: Horovod's own, or as a scheme beside the sparse ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from ..errors import OptionError
from ..phases.link import Link
from ..selection.accumulator import Accumulator
from ..selection.selection import Selection
from ..transport.base import Counts
from ..vectors.sparse import RunVector, SparseVector
from .algorithm import EVERYTHING, NOTHING, Algorithm, Call, Memory, Result
from .options import Scheme


class Dense:
    """Horovod's own dense allreduce, overlapped with the backward pass, behind the same argument; no options.

    Its speed over MPI is that of MPI's algorithm; `docs/benchmarks.md` says how to choose one.

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


def means_dense(compression: Any) -> bool:
    """Return True for Dense(), and for the class itself."""
    return compression is Dense or isinstance(compression, Dense)


class DenseAllreduce(Algorithm):
    """u = Σ acc. A rank sends 2n(P-1)/P words."""

    def select(self, acc: Accumulator, k: int, memory: Memory) -> Selection:  # noqa: ARG002
        return replace(Selection.of(SparseVector.empty(acc.dtype), 0.0), dense=acc.values())

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        return NOTHING

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:  # noqa: ARG002
        assert mine.dense is not None
        with link.transport.phase("allreduce"):
            total = RunVector.between(0, link.transport.allreduce(mine.dense))
        return Result(total, EVERYTHING, Memory(call.t), total.with_values(mine.dense))


@dataclass(frozen=True, eq=False)
class DenseSum(Scheme):
    """`Dense` inside `Partial` and `StepAhead`: all elements go over our own transport; no residual."""

    reduces = DenseAllreduce
    density: float = 1.0

    def with_density(self, density: float | Literal["auto"] | None) -> NoReturn:
        """Raise OptionError: all elements are sent."""
        raise OptionError(f"Dense sends all elements, and has no density: set it for another scheme; got {density!r}")
