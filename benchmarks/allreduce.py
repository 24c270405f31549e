"""One rank of benchmarks/cluster.py: times one scheme's allreduce, and counts its bytes.

The gradients have a direction that all ranks share and noise of each rank's own; both change from step to step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from step import Gradients

from horovod_oktopk import GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from horovod_oktopk.core.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.transport.mpi import MPITransport

WARM_UP = 20
INTERFACE = Path("/sys/class/net/eth0/statistics/tx_bytes")
SPARSE = {"OkTopk": OkTopk, "TopkA": TopkA, "TopkDSA": TopkDSA, "GTopk": GTopk, "GaussianK": GaussianK}
Vector = np.ndarray[Any, Any]
Reduce = Callable[[Vector], int | None]
"""Reduces the gradient in place; the bytes that this rank sent, where they are counted."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--density", type=float, required=True)
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
    algorithm = options.scheme("benchmark: allreduce")
    transport = CountingTransport(MPITransport(MPI.COMM_WORLD.Dup()))

    def reduce(gradient: Vector) -> int:
        transport.reset()
        finite = accumulator.accumulate([(0, gradient)])
        reduction = algorithm.reduce(accumulator, options.k_of(n), finite, transport)
        assert reduction.update is not None
        accumulator.commit(reduction.contributed)
        gradient.fill(0)
        gradient[reduction.update.indices] = reduction.update.values
        return reduction.report.bytes_sent

    return reduce


def main() -> None:
    arguments = parse_arguments()
    n, comm = arguments.parameters, MPI.COMM_WORLD
    reduce = {"Horovod dense": horovod_dense, "MPI dense": mpi_dense}.get(
        arguments.scheme, lambda: sparse(arguments.scheme, n, arguments.density))()
    gradients, gradient = Gradients(n, seed=1, noise_seed=100 + comm.rank), np.zeros(n, np.float32)
    seconds, counted, interface = [], [], []
    for step in range(WARM_UP + arguments.steps):
        gradients.fill(gradient)
        comm.Barrier()
        sent, start = int(INTERFACE.read_text()), time.perf_counter()
        bytes_sent = reduce(gradient)
        elapsed = comm.allreduce(time.perf_counter() - start, op=MPI.MAX)
        if step >= WARM_UP:
            seconds.append(elapsed)
            interface.append(int(INTERFACE.read_text()) - sent)
            counted.append(bytes_sent)
    means = comm.gather((statistics.median(interface), None if counted[0] is None else statistics.median(counted)))
    if means is not None:
        interfaces, counts = zip(*means, strict=True)
        arguments.json.write_text(json.dumps({
            "seconds": statistics.median(seconds), "interface_bytes": statistics.mean(interfaces),
            "bytes_sent": None if counts[0] is None else statistics.mean(counts), "ranks": comm.size}))


if __name__ == "__main__":
    main()
