"""The way through a step, the same for every scheme: select, hold the roll call, exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..phases.agreement import Attendance, Measured, roll_call
from ..phases.link import Link
from ..selection.accumulator import Accumulator, EmptyAccumulator
from ..selection.selection import Selection
from ..transport.counting import CountingTransport
from ..vectors.wire import WireCodec
from .algorithm import Algorithm, Call, Memory, Result
from .report import StepReport


@dataclass(frozen=True)
class Begun:
    """A step that has selected, and has not met the other workers yet."""

    algorithm: Algorithm
    mine: Selection
    said: Attendance
    memory: Memory
    transport: CountingTransport
    report: StepReport


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step on one rank. The caller commits it to its accumulator, or drops it."""

    report: StepReport
    memory: Memory
    """The memory for the next step, if this one counts."""
    result: Result | None = None
    """None if some rank's gradient was not finite."""
    not_finite: tuple[int, ...] = ()
    """The ranks whose acc was not finite."""
    measured: Measured | None = None
    """The measurements of all ranks, see `agreement.Attendance`."""
    level: int = 0
    """The level that rank 0 has told, see there."""


def begin(algorithm: Algorithm, acc: Accumulator, said: Attendance, memory: Memory, transport: CountingTransport,
          n: int | None = None) -> Begun:
    """Begin a step with the part that reads acc: select.

    `said` is what this rank says in the roll call; its counts, step and memory are added here. `n` is the number of
    the worker's elements, if acc has a part of them.
    """
    n, k, workers = acc.n if n is None else n, said.k, algorithm.workers(transport)
    memory = memory.for_workers(workers)
    given = acc if said.finite and acc.n else EmptyAccumulator(acc.n, acc.dtype)  # a part may be empty
    with transport.phase("select"):
        mine = algorithm.select(given, max(1, min(k, n)), memory)
    report = StepReport(memory.step + 1, n, min(k, n), algorithm.global_k(k, n, workers),
                        local_selected=len(mine.elements), local_threshold=mine.threshold, phases=transport.phases)
    said = replace(said, step=memory.step, memory=algorithm.digest(memory))
    return Begun(algorithm, mine, said, memory, transport, report)


def complete(begun: Begun) -> Outcome:
    """Complete a step with the part that communicates, within `transport.step`. Collective.

    Raise AgreementError or TransportError, on every rank.
    """
    algorithm, mine, memory, transport = begun.algorithm, begun.mine, begun.memory, begun.transport
    report = begun.report
    with transport.phase("agree"):
        said = replace(begun.said, counts=algorithm.counts(mine, report.n, memory, transport.size))
        heard = roll_call(said, transport)
    report.step, report.same_rates, report.finite = heard.step + 1, heard.same_rates, heard.finite
    if not report.finite:
        return Outcome(report, memory, not_finite=heard.not_finite, level=heard.level)
    link, mine = Link(transport, WireCodec(mine.elements.values.dtype, algorithm.value_dtype)).fitted_to(mine)
    call = Call(t=report.step, in_sync=heard.in_sync, counts=heard.counts, n=report.n, k=said.k, kept=report.global_k,
                k_as_kept=said.k, lengths=np.full(transport.size, said.k))
    result = algorithm.exchange(mine, call, memory, link)
    report.local_selected, report.global_selected = len(result.selected), len(result.update)
    report.global_threshold = result.memory.threshold or 0.0
    report.repartitioned, report.balanced = result.repartitioned, result.balanced
    return Outcome(report, result.memory, result, measured=heard.measured, level=heard.level)


def reduce(algorithm: Algorithm, acc: Accumulator, said: Attendance, memory: Memory, transport: CountingTransport,
           n: int | None = None) -> Outcome:
    """Take one step. Collective. The arguments and errors are those of `begin` and `complete`."""
    begun = begin(algorithm, acc, said, memory, transport, n)
    with transport.step():
        return complete(begun)
