"""One rank of benchmarks.cluster.compare: times schemes' allreduces one after the other, and counts their bytes.

Gradients are recorded ones (benchmarks.data.models), or synthetic: a direction that all ranks share, and noise of
each rank's own, both changing from step to step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.data.gradients import Gradients, Recorded, Source
from horovod_oktopk import GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from horovod_oktopk.kernels.kernels import KERNELS
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.transport.mpi import MPITransport
from horovod_oktopk.vectors.sparse import DenseVector, SparseVector

INTERFACE = Path("/sys/class/net/eth0/statistics/tx_bytes")
SPARSE = {"OkTopk": OkTopk, "OkTopk, bfloat16": partial(OkTopk, value_dtype="bfloat16"),
          "OkTopk, reuse": partial(OkTopk, selection="reuse"), "OkTopk, auto": partial(OkTopk, strategy="auto"),
          "TopkA": TopkA, "TopkDSA": TopkDSA, "GTopk": GTopk, "GaussianK": GaussianK}
LOCAL_PHASES = ("accumulate", "select", "sum", "write_back")
Vector = np.ndarray[Any, Any]
Reduce = Callable[[Vector], StepReport | None]
"""Reduces the gradient in place; what a sparse scheme did."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--densities", nargs="+", type=float, required=True, help="for each sparse scheme")
    parser.add_argument("--gradients", type=Path, help="recorded ones, of as many parameters")
    parser.add_argument("--warm-up", type=int, required=True, help="steps of a sparse scheme before those timed")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True, help="rank 0 writes the results here")
    return parser.parse_args()


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


def sparse(scheme: str, n: int, density: float) -> Reduce:
    options = SPARSE[scheme](density=density)
    accumulator = NumpyAccumulator(n)
    algorithm = options.build("benchmark: allreduce")
    transport = CountingTransport(MPITransport(MPI.COMM_WORLD.Dup()))

    def reduce(gradient: Vector) -> StepReport:
        transport.reset()
        with transport.phase("accumulate"):
            finite = accumulator.accumulate([(0, gradient)], clear=True)
        result = algorithm.reduce(accumulator, options.k_of(n), finite, transport)
        assert result.update is not None
        with transport.phase("write_back"):
            accumulator.commit(result.contributed, result.remainder)
            write(result.update, gradient)
        return result.report

    return reduce


def write(update: SparseVector | DenseVector, gradient: Vector) -> None:
    """As an integration writes it, over a gradient that the accumulation has cleared."""
    if isinstance(update, DenseVector):
        gradient[:] = update.values
    else:
        KERNELS.scatter(gradient, update.indices, update.values, zero=True)


def measure(reduce: Reduce, gradients: Source, n: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Medians of the steps: seconds of the slowest rank, and of the mean rank bytes and seconds on its own."""
    comm, gradient = MPI.COMM_WORLD, np.zeros(n, np.float32)
    seconds, interface, reports = [], [], []
    for step in range(warm_up + steps):
        gradients.fill(gradient)
        comm.Barrier()
        sent, start = int(INTERFACE.read_text()), time.perf_counter()
        report = reduce(gradient)
        elapsed = comm.allreduce(time.perf_counter() - start, op=MPI.MAX)
        if step >= warm_up:
            seconds.append(elapsed)
            interface.append(int(INTERFACE.read_text()) - sent)
            reports.append(report)
    mine = {"interface_bytes": statistics.median(interface)}
    told = [report for report in reports if report is not None]
    if told:
        mine["bytes_sent"] = statistics.median(report.bytes_sent for report in told)
        mine["local_seconds"] = statistics.median(
            sum(report.phases[name].seconds for name in LOCAL_PHASES if name in report.phases) for report in told)
        mine["selected"] = statistics.mean(report.global_selected / report.k for report in told)
    everyone = comm.allgather(mine)
    return {"seconds": statistics.median(seconds),
            **{name: statistics.mean(row[name] for row in everyone) for name in mine}}


def main() -> None:
    arguments = parse_arguments()
    n, rank = arguments.parameters, MPI.COMM_WORLD.rank
    results = []
    for scheme in arguments.schemes:
        for density in arguments.densities if scheme in SPARSE else [None]:
            gradients = (Recorded(arguments.gradients, rank) if arguments.gradients
                         else Gradients(n, seed=1, noise_seed=100 + rank))
            reduce = {"Horovod dense": horovod_dense, "MPI dense": mpi_dense}.get(
                scheme, lambda s=scheme, d=density: sparse(s, n, d))()
            found = measure(reduce, gradients, n, arguments.warm_up if scheme in SPARSE else 1, arguments.steps)
            results.append({"scheme": scheme, "density": density, "ranks": MPI.COMM_WORLD.size, "n": n, **found})
    if rank == 0:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
