"""The part of a step that communicates, and its results for w and for p."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from ...kernels import KERNELS
from ...phases.host import whole_update
from ...schemes.algorithm import Algorithm, Step
from ...schemes.step_result import StepResult
from ...transport.counting import Hosts
from ...vectors.sparse import DenseVector, SparseVector
from .exchange import Outcome


def complete(algorithm: Algorithm, step: Step, divisor: float) -> Outcome:
    """Complete the exchange of a step that has begun. divisor: the number to divide a sum by for w."""
    hosts, n = step.transport.hosts, step.report.n
    with nullcontext() if hosts is None else hosts.step():
        outcome = _outcome(algorithm.complete(step), divisor, hosts, n)
    return replace(outcome, measured=step.call.measured)


def _outcome(result: StepResult, divisor: float, hosts: Hosts | None, n: int) -> Outcome:
    if result.update is None or not np.isfinite(result.update.values).all():
        return Outcome(result, None, None)
    update = result.update.divided(divisor)
    if hosts is None:
        return Outcome(replace(result, selected=None), update, local_change(update, result))
    assert isinstance(update, SparseVector)
    change = local_change(_share_of(update, hosts, n), result)
    assert isinstance(change, SparseVector)
    return Outcome(replace(result, selected=None), update, whole(change, hosts, n))


def _share_of(update: SparseVector, hosts: Hosts, n: int) -> SparseVector:
    """Return the part of an update that lies in this rank's share, with indices from the share's start."""
    start, stop = hosts.bounds(n)[hosts.within.rank:hosts.within.rank + 2].tolist()
    part = slice(*np.searchsorted(update.indices, [start, stop]).tolist())
    return SparseVector(update.indices[part] - start, update.values[part])


def whole(vector: SparseVector, hosts: Hosts | None, n: int) -> SparseVector:
    """Return the vector of all shares of n elements; each rank of a host gives that of its own share."""
    if hosts is None:
        return vector
    with hosts.within.phase("host_gather"):
        return whole_update(vector, hosts.bounds(n), hosts.within)


def local_change(update: SparseVector | DenseVector, result: StepResult) -> SparseVector | DenseVector:
    """Return the change of p: minus the update, plus this rank's contribution to the update.

    All indices that contributed, and all that rounding left over, are indices of the update.
    """
    sent = result.sent()
    if isinstance(update, DenseVector):
        return DenseVector(sent.values - update.values)
    assert isinstance(sent, SparseVector)
    change = -update.values
    KERNELS.add(change, KERNELS.common_positions(update.indices, sent.indices), sent.values)
    kept = result.remainder
    if kept is not None:
        KERNELS.add(change, KERNELS.common_positions(update.indices, kept.indices), -kept.values)
    return SparseVector(update.indices, change)
