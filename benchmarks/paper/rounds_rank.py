"""One rank of rounds.py: times allreduces to which the ranks come one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from benchmarks import launch
from horovod_oktopk.modes.partial.rounds import PartialAllreduce, Round
from horovod_oktopk.modes.partial.states import Presence
from horovod_oktopk.transport.mpi.transport import MPITransport

Kind = Literal["MPI_Allreduce", "majority", "solo"]
WARM_UP = 4
"""Calls before those timed; in the first MPI connects the ranks."""


def measure(kinds: list[Kind], elements: int, skew: float, iterations: int) -> list[dict[str, Any]]:
    """Measure each kind of allreduce. skew: seconds between two ranks."""
    return [{"kind": kind, "elements": elements, **measure_kind(kind, elements, skew, iterations)} for kind in kinds]


def measure_kind(kind: Kind, elements: int, skew: float, iterations: int) -> dict[str, float]:
    """Return mean seconds of the calls of all ranks, the mean number of active ranks, and the number of rounds."""
    mine = np.ones(elements, np.float32)
    if kind == "MPI_Allreduce":
        comm, total = MPI.COMM_WORLD.Dup(), np.empty_like(mine)
        seconds = timed(lambda: comm.Allreduce(mine, total), skew, iterations)
        active = [comm.size] * iterations
    else:
        seconds, rounds = timed_rounds(kind, mine, skew, iterations)
        active = [each.presences.count(Presence.FRESH) for each in rounds]
    everyone = MPI.COMM_WORLD.allgather(seconds)
    return {"seconds": statistics.mean(each for row in everyone for each in row), "active": statistics.mean(active),
            "rounds": len(active)}


def timed_rounds(policy: Literal["majority", "solo"], mine: np.ndarray[Any, Any], skew: float, iterations: int,
                 ) -> tuple[list[float], list[Round]]:
    """Return the seconds of this rank's calls, and the rounds that were started by a call."""
    transport, nothing, rounds = MPITransport(MPI.COMM_WORLD.Dup(), yield_cpu=True), np.zeros_like(mine), []
    partial = PartialAllreduce(policy, lambda contributes, _: transport.allreduce(mine if contributes else nothing),
                               transport, transport.signals())
    seconds = timed(lambda: rounds.extend(partial.arrive(lambda: ())), skew, iterations)
    for more in partial.synchronize(for_good=True):
        rounds += more
    partial.end()
    return seconds, [each for each in rounds if Presence.FRESH in each.presences]


def timed(call: Callable[[], object], skew: float, iterations: int) -> list[float]:
    """Return the seconds of each call, which begins when this rank comes."""
    seconds = []
    for _ in range(WARM_UP + iterations):
        wait_without_a_core()
        time.sleep(skew * MPI.COMM_WORLD.rank)
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def wait_without_a_core() -> None:
    """Hold a barrier; a rank that waits leaves its core to the others."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


if __name__ == "__main__":
    launch.run_rank(measure)
