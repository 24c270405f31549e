"""One rank of latency.py: times allreduces to which the ranks come one after the other."""

from __future__ import annotations

import statistics
import time
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from benchmarks import launch
from horovod_oktopk.modes.partial.rounds import PartialAllreduce
from horovod_oktopk.transport.mpi.transport import MPITransport

Kind = Literal["MPI_Allreduce", "majority", "solo"]


def measure(kinds: list[Kind], elements: list[int], skew: float, iterations: int) -> list[dict[str, Any]]:
    """Each kind of allreduce, of each number of elements. skew: seconds between two ranks."""
    return [measure_kind(kind, count, skew, iterations) for count in elements for kind in kinds]


def measure_kind(kind: Kind, elements: int, skew: float, iterations: int) -> dict[str, Any]:
    """Mean seconds of the calls of all ranks, and the mean number of active ranks."""
    world, transport = MPI.COMM_WORLD, MPITransport(MPI.COMM_WORLD.Dup(), yield_cpu=kind != "MPI_Allreduce")
    mine, nothing = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    partial = None if kind == "MPI_Allreduce" else PartialAllreduce(
        kind, lambda contributes, _: transport.allreduce(mine if contributes else nothing), transport,
        transport.signals())
    latencies, active = [], []
    for _ in range(iterations):
        wait_without_a_core(world)
        time.sleep(skew * world.rank)
        start = time.perf_counter()
        if partial is None:
            transport.allreduce(mine)
            active.append(world.size)
        else:
            active += [each.active for each in partial.arrive(lambda: ())]
        latencies.append(time.perf_counter() - start)
    if partial is not None:
        list(partial.synchronize(for_good=True))
        partial.end()
    everyone = world.allgather(latencies)
    return {"kind": kind, "elements": elements, "active": statistics.mean(active),
            "latency": statistics.mean(each for row in everyone for each in row)}


def wait_without_a_core(world: Any) -> None:
    """A barrier; a rank that waits leaves its core to the others."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


if __name__ == "__main__":
    launch.run_rank(measure)
