"""One rank of compare.py and sizes.py: times schemes' allreduces one after the other, and counts their bytes.

Gradients are recorded ones (benchmarks.data.record), or synthetic: a direction that all ranks share, and noise of
each rank's own, both changing from step to step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks import launch
from benchmarks.data.gradients import Gradients, Recorded, Source
from horovod_oktopk import GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from horovod_oktopk.hosts.sums import HostAccumulator
from horovod_oktopk.hosts.worker import worker_of
from horovod_oktopk.kernels import KERNELS
from horovod_oktopk.phases.agreement import Attendance
from horovod_oktopk.schemes.algorithm import Memory
from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.schemes.step import reduce
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.connect import Connection
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.transport.mpi.transport import MPITransport
from horovod_oktopk.vectors.sparse import SparseVector

INTERFACE = Path("/sys/class/net/eth0/statistics/tx_bytes")
SPARSE: dict[str, Callable[..., Scheme]] = {
    "OkTopk": OkTopk, "OkTopk, bfloat16": partial(OkTopk, value_dtype="bfloat16"),
    "OkTopk, log4": partial(OkTopk, value_dtype="log4"), "OkTopk, reuse": partial(OkTopk, selection="reuse"),
    "OkTopk, hierarchical": OkTopk,
    "OkTopk, log4, hierarchical": partial(OkTopk, value_dtype="log4"),
    "TopkA": TopkA, "TopkDSA": TopkDSA, "GTopk": GTopk, "GaussianK": GaussianK}
LOCAL_PHASES = ("accumulate", "host_sum", "select", "sum", "write_back")
Vector = np.ndarray[Any, Any]
Reduce = Callable[[Vector], StepReport | None]
"""Reduces the gradient in place; what a sparse scheme did."""


def horovod_dense() -> Reduce:
    import horovod.torch as hvd
    import torch
    hvd.init()

    def reduce(gradient: Vector) -> None:
        hvd.allreduce_(torch.from_numpy(gradient), name="gradient", op=hvd.Sum)

    return reduce


def mpi_dense() -> Reduce:
    comm = MPI.COMM_WORLD.Dup()

    def reduce(gradient: Vector) -> None:
        comm.Allreduce(MPI.IN_PLACE, gradient)

    return reduce


DENSE: dict[str, Callable[[], Reduce]] = {"Horovod dense": horovod_dense, "MPI dense": mpi_dense}


def sparse(scheme: str, n: int, density: float) -> Reduce:
    return reduction(SPARSE[scheme](density=density), n, connected("hierarchical" in scheme))


def reduction(options: Scheme, n: int, connection: Connection) -> Callable[[Vector], StepReport]:
    worker, transport, k = worker_of(options.algorithm(), connection), connection.transport, options.k_of(n)
    accumulator = (NumpyAccumulator(n) if connection.grid is None
                   else HostAccumulator(n, np.float32, lambda: worker.hosts))
    memory = Memory()

    def reduce_in_place(gradient: Vector) -> StepReport:
        nonlocal memory
        transport.reset()
        worker.agree(Attendance("", k, memory.step))
        with transport.phase("accumulate"):
            finite = accumulator.accumulate([(0, gradient)], clear=True)
        outcome = reduce(worker.algorithm, accumulator, Attendance("", k, finite=finite), memory, transport, n)
        memory, result = outcome.memory, outcome.result
        assert result is not None
        with transport.phase("write_back"):
            accumulator.commit(result.contributed, result.remainder)
            write(result.update, gradient)
        return outcome.report

    return reduce_in_place


def connected(hierarchical: bool = False) -> Connection:
    """Connect all ranks. hierarchical: each host is one worker; hosts have equally many ranks, one after another."""
    everyone, grid = MPI.COMM_WORLD.Dup(), None
    if hierarchical:
        grid = np.arange(everyone.size).reshape(-1, int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]))
    return Connection(CountingTransport(MPITransport(everyone)), lambda members: MPITransport(
        everyone.Create_group(everyone.group.Incl(members.tolist()))), grid)


def write(update: SparseVector, gradient: Vector) -> None:
    """Write the update as an integration does, over a gradient that the accumulation has cleared."""
    if len(update) == len(gradient):
        gradient[:] = update.values
    else:
        KERNELS.scatter(gradient, update.indices, update.values, zero=True)


class Steps:
    """Costs of the timed steps, on this rank."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._interface: list[int] = []
        self._reports: list[StepReport] = []

    def add(self, seconds: float, interface_bytes: int, report: StepReport | None) -> None:
        """Add a step. seconds: of the slowest rank. report: of a sparse scheme."""
        self._seconds.append(seconds)
        self._interface.append(interface_bytes)
        self._reports += [] if report is None else [report]

    def summary(self) -> dict[str, Any]:
        """Return medians of the steps, in the mean over ranks; `local_seconds` are those of a rank's own passes."""
        mine = {"seconds": statistics.median(self._seconds), "interface_bytes": statistics.median(self._interface)}
        if self._reports:
            mine["bytes_sent"] = statistics.median(report.bytes_sent for report in self._reports)
            mine["local_seconds"] = statistics.median(
                sum(report.phases[name].seconds for name in LOCAL_PHASES if name in report.phases)
                for report in self._reports)
            mine["selected"] = statistics.mean(report.global_selected / report.k for report in self._reports)
        everyone = MPI.COMM_WORLD.allgather(mine)
        return {name: statistics.mean(row[name] for row in everyone) for name in mine}


def take_steps(reduce: Reduce, gradients: Source, n: int, warm_up: int, steps: int) -> dict[str, Any]:
    comm, gradient, timed = MPI.COMM_WORLD, np.zeros(n, np.float32), Steps()
    for step in range(warm_up + steps):
        gradients.fill(gradient)
        comm.Barrier()
        sent, start = int(INTERFACE.read_text()), time.perf_counter()
        report = reduce(gradient)
        elapsed = comm.allreduce(time.perf_counter() - start, op=MPI.MAX)
        if step >= warm_up:
            timed.add(elapsed, int(INTERFACE.read_text()) - sent, report)
    return timed.summary()


def measure(schemes: list[str], densities: list[float], parameters: int, warm_up: int, steps: int,
            gradients: str | None) -> list[dict[str, Any]]:
    """Measure each scheme, sparse ones with each density. gradients: a file of recorded ones, of as many parameters.

    warm_up: steps of a sparse scheme before those timed.
    """
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    results = []
    for scheme in schemes:
        for density in [None] if scheme in DENSE else densities:
            source: Source = (Recorded(Path(gradients), rank) if gradients
                              else Gradients(parameters, seed=1, noise_seed=100 + rank))
            reduce = DENSE[scheme]() if density is None else sparse(scheme, parameters, density)
            found = take_steps(reduce, source, parameters, 1 if density is None else warm_up, steps)
            results.append({"scheme": scheme, "density": density, "ranks": size, "n": parameters, **found})
    return results


if __name__ == "__main__":
    launch.run_rank(measure)
