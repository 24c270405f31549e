"""Latency of partial allreduces if ranks come one after the other (Figures 8 and 9 of Li et al., PPoPP 2020).

Rank i of 8 comes i times 20 ms after a barrier, 64 times. Its latency is from there to its result. MPI's allreduce
waits for the last rank, majority for one that is drawn, and solo for none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import launch, output

KINDS = ("MPI_Allreduce", "majority", "solo")
SIZES = (16, 16_384, 1_048_576)
"""float32 elements of one allreduce."""


def measure(progress: Any, ranks: int = 8, sizes: tuple[int, ...] = SIZES, skew: float = 0.02,
            iterations: int = 64) -> dict[str, Any]:
    """Return mean seconds of a call, and mean numbers of active ranks. skew: seconds between two ranks."""
    results: list[dict[str, Any]] = []
    for elements in progress(sizes, "rounds"):
        settings = {"kinds": KINDS, "elements": elements, "skew": skew, "iterations": iterations}
        results += launch.measured(launch.horovodrun(ranks), "benchmarks.paper.rounds_rank", settings, 600.0)
    return {"ranks": ranks, "skew": skew, "iterations": iterations, "results": results}


def rows(found: dict[str, Any]) -> list[list[str]]:
    table = [["elements", "allreduce", "ms", "times shorter than MPI's", "active ranks"]]
    for r in found["results"]:
        whole = next(o["seconds"] for o in found["results"]
                     if (o["kind"], o["elements"]) == ("MPI_Allreduce", r["elements"]))
        table.append([f"{r['elements']:,}", r["kind"], f"{1e3 * r['seconds']:.2f}", f"{whole / r['seconds']:.1f}",
                      f"{r['active']:.2f}"])
    return table


def plot(found: dict[str, Any], path: Path) -> None:
    series = {kind: [1e3 * r["seconds"] for r in found["results"] if r["kind"] == kind] for kind in KINDS}
    sizes = dict.fromkeys(f"{r['elements']:,} elements" for r in found["results"])
    output.grouped_bars(path, f"{found['ranks']} ranks, each {1e3 * found['skew']:g} ms after the one before",
                        "mean latency (ms)", list(sizes), series)
