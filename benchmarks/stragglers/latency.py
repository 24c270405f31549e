"""Latency of partial allreduces where ranks come one after the other (Figures 8 and 9 of Li et al., PPoPP 2020).

    .venv/bin/python -m benchmarks.stragglers.latency

Rank i of 8 comes i times 20 ms after a barrier, 64 times; its latency is from there to its result. MPI's allreduce
waits for the last rank, majority for one that is drawn, solo for none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

KINDS = {"MPI_Allreduce": "#999999", "majority": "#4c72b0", "solo": "#dd8452"}
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
Result = dict[str, Any]


def measure(kind: str, elements: int, skew: float, iterations: int) -> Result:
    """On one rank: mean seconds of the calls of all ranks, and the mean number of active ranks."""
    from mpi4py import MPI

    from horovod_oktopk.partial.rounds import PartialAllreduce
    from horovod_oktopk.transport.mpi import MPITransport
    world, transport = MPI.COMM_WORLD, MPITransport(MPI.COMM_WORLD.Dup(), yield_cpu=kind != "MPI_Allreduce")
    mine, nothing = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    partial = None if kind == "MPI_Allreduce" else PartialAllreduce(
        kind, lambda contributes, _: transport.allreduce(mine if contributes else nothing), transport,
        transport.signals())
    latencies, active = [], []
    for _ in range(iterations):
        _quiet_barrier(world)
        time.sleep(skew * world.rank)
        start = time.perf_counter()
        if partial is None:
            transport.allreduce(mine)
            active.append(world.size)
        else:
            active += [each.active for each in partial.arrive(lambda: ())]
        latencies.append(time.perf_counter() - start)
    if partial is not None:
        list(partial.part(for_good=True))
        partial.end()
    everyone = world.allgather(latencies)
    return {"kind": kind, "elements": elements, "active": statistics.mean(active),
            "latency": statistics.mean(each for row in everyone for each in row)}


def _quiet_barrier(world: Any) -> None:
    """Without a core kept busy by each rank that waits, as others compute on it."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


def run_rank(arguments: argparse.Namespace) -> None:
    from mpi4py import MPI
    results = [measure(kind, elements, arguments.skew / 1e3, arguments.iterations)
               for elements in arguments.elements for kind in KINDS]
    if MPI.COMM_WORLD.rank == 0:
        arguments.json.write_text(json.dumps(results))


def launch(arguments: argparse.Namespace) -> list[Result]:
    """All results, of a job on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-np", str(arguments.ranks), "--mca",
                   "mpi_yield_when_idle", "1", sys.executable, "-m", __spec__.name, "--rank", "--skew",
                   str(arguments.skew),
                   "--iterations", str(arguments.iterations), "--json", str(outcome), "--elements",
                   *map(str, arguments.elements)]
        subprocess.run(command, check=True)
        results: list[Result] = json.loads(outcome.read_text())
        return results


def show(results: list[Result], arguments: argparse.Namespace) -> None:
    table = Table(title=f"{arguments.ranks} ranks, {arguments.skew:g} ms apart")
    table.add_column("elements", justify="right")
    table.add_column("", no_wrap=True)
    for heading in ("mean latency, ms", "times shorter", "active ranks"):
        table.add_column(heading, justify="right")
    for r in results:
        whole = next(o["latency"] for o in results if (o["kind"], o["elements"]) == ("MPI_Allreduce", r["elements"]))
        table.add_row(f"{r['elements']:,}", r["kind"], f"{1e3 * r['latency']:.2f}", f"{whole / r['latency']:.1f}",
                      f"{r['active']:.2f}")
    Console().print(table)


def plot(results: list[Result], arguments: argparse.Namespace, path: Path) -> None:
    """Latency and active ranks, by length."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for place, (kind, color) in enumerate(KINDS.items()):
        mine = [r for r in results if r["kind"] == kind]
        where = [index + 0.27 * (place - 1) for index in range(len(mine))]
        bars = left.bar(where, [1e3 * r["latency"] for r in mine], 0.25, color=color, label=kind)
        left.bar_label(bars, fmt="%.1f", fontsize=8)
        bars = right.bar(where, [r["active"] for r in mine], 0.25, color=color)
        right.bar_label(bars, fmt="%.1f", fontsize=8)
    for axes, label in ((left, "mean latency (ms)"), (right, "active ranks")):
        axes.set_ylabel(label)
        axes.set_xlabel("float32 elements")
        axes.set_xticks(range(len(arguments.elements)), [f"{n:,}" for n in arguments.elements])
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{arguments.ranks} ranks, each {arguments.skew:g} ms after the one before")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--skew", type=float, default=20.0, help="milliseconds between two ranks")
    parser.add_argument("--iterations", type=int, default=64)
    parser.add_argument("--elements", type=int, nargs="+", default=[16, 16_384, 1_048_576])
    parser.add_argument("--json", type=Path, default=Path("runs/partial.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/partial.png"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments)
        return
    results = launch(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))
    show(results, arguments)
    plot(results, arguments, arguments.plot)


if __name__ == "__main__":
    main()
