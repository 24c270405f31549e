"""One rank of balance.py: times OkTopk with balanced and with equal regions, on selections that crowd together."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks import launch
from benchmarks.cluster.allreduce import connected, reduction
from horovod_oktopk import OkTopk
from horovod_oktopk.phases.agreement import tell
from horovod_oktopk.phases.division import Division
from horovod_oktopk.phases.link import Link
from horovod_oktopk.phases.regions import count_by_region
from horovod_oktopk.schemes.algorithm import Call, Memory
from horovod_oktopk.schemes.oktopk import OkTopkAllreduce
from horovod_oktopk.schemes.options import Unit
from horovod_oktopk.selection.selection import Selection

PARTS = {"split": ("agree", "split_and_reduce"), "gather": ("balance", "allgatherv")}
"""Phases by part of the exchange. The cost of a repartition is in "agree"."""
WORD = 4


class NaiveAllreduce(OkTopkAllreduce):
    """Ok-Topk's phases with regions of equal length, of which rank i owns region i; blocks are never balanced."""

    balance_trigger = math.inf

    def _regions(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Division:  # noqa: ARG002
        transport = link.transport
        boundaries = np.arange(transport.size + 1) * call.n // transport.size
        sent = count_by_region(mine.sent.indices, boundaries)
        with transport.phase("agree"):
            _, counts = tell(np.empty(0, np.uint32), sent, transport)
        return Division(boundaries, sent, counts[:, transport.rank], load_sent=counts.sum(axis=1),
                        load_received=counts.sum(axis=0))


class Naive(OkTopk):
    """The options of NaiveAllreduce."""

    def algorithm(self, unit: Unit = "gradients") -> OkTopkAllreduce:
        return NaiveAllreduce(self, unit)


SPLITS = {"balanced": OkTopk, "naive": Naive}


def fill(gradient: NDArray[np.float32], case: str, k: int, random: np.random.Generator) -> None:
    """Write weak noise, and k large elements: "even", all over; "crowded", in three places of all ranks."""
    n = len(gradient)
    random.standard_normal(out=gradient, dtype=np.float32)
    gradient *= 0.01
    places = [0] if case == "even" else [n // 10, n // 4, n // 2]
    width = n if case == "even" else 2 * k
    indices = np.concatenate([place + random.choice(width, k // len(places), replace=False) for place in places])
    gradient[indices] += 1 + random.random(len(indices), dtype=np.float32)


def measure(case: str, n: int, density: float, warm_up: int, steps: int) -> list[dict[str, Any]]:
    """Return figures of each split: medians of the steps, of the rank for which they are largest."""
    return [{"case": case, "split": split, "k": options(density=density).k_of(n),
             **take_steps(options(density=density), case, n, warm_up, steps)} for split, options in SPLITS.items()]


def take_steps(options: OkTopk, case: str, n: int, warm_up: int, steps: int) -> dict[str, float]:
    comm, gradient, figures = MPI.COMM_WORLD, np.empty(n, np.float32), []
    reduce, random = reduction(options, n, connected()), np.random.default_rng([1, comm.rank])
    for _ in range(warm_up + steps):
        fill(gradient, case, options.k_of(n), random)
        comm.Barrier()
        start = time.perf_counter()
        report = reduce(gradient)
        found = {"seconds": time.perf_counter() - start}
        for part, names in PARTS.items():
            crossed = [report.phases[name] for name in names if name in report.phases]
            found |= {f"{part}_seconds": sum(each.seconds for each in crossed),
                      f"{part}_words": sum(max(each.bytes_sent, each.bytes_received) for each in crossed) / WORD}
        figures.append({name: comm.allreduce(value, op=MPI.MAX) for name, value in found.items()})
    return {name: statistics.median(each[name] for each in figures[warm_up:]) for name in figures[0]}


if __name__ == "__main__":
    launch.run_rank(measure)
