"""Latency of partial allreduces if ranks come one after the other (Figures 8 and 9 of Li et al., PPoPP 2020).

Rank i of 8 comes i times 20 ms after a barrier, 64 times. Its latency is from there to its result. MPI's allreduce
waits for the last rank, majority for one that is drawn, and solo for none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import launch, output
from benchmarks.output import BLUE, GREY, ORANGE

KINDS = {"MPI_Allreduce": GREY, "majority": BLUE, "solo": ORANGE}
SIZES = (16, 16_384, 1_048_576)
"""float32 elements of one allreduce."""
TIMEOUT = 600.0


def measure(progress: Any, ranks: int = 8, sizes: tuple[int, ...] = SIZES, skew: float = 0.02,
            iterations: int = 64) -> dict[str, Any]:
    """Return mean seconds of a call, and mean numbers of active ranks. skew: seconds between two ranks."""
    results: list[dict[str, Any]] = []
    for elements in progress(sizes, "rounds"):
        settings = {"kinds": list(KINDS), "elements": elements, "skew": skew, "iterations": iterations}
        results += launch.measured(launch.horovodrun(ranks), "benchmarks.paper.rounds_rank", settings, TIMEOUT)
    return {"ranks": ranks, "skew": skew, "iterations": iterations, "results": results}


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Return a table with a row for each size and allreduce."""
    table = [["elements", "allreduce", "ms", "times shorter than MPI's", "active ranks"]]
    for r in found["results"]:
        whole = next(o["seconds"] for o in found["results"]
                     if (o["kind"], o["elements"]) == ("MPI_Allreduce", r["elements"]))
        table.append([f"{r['elements']:,}", r["kind"], f"{1e3 * r['seconds']:.2f}", f"{whole / r['seconds']:.1f}",
                      f"{r['active']:.2f}"])
    return table


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw latency and active ranks, by size."""
    figure, panels = output.load_pyplot().subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    sizes = sorted({r["elements"] for r in found["results"]})
    for place, (kind, color) in enumerate(KINDS.items(), start=-1):
        mine = [r for r in found["results"] if r["kind"] == kind]
        where = [index + 0.27 * place for index in range(len(mine))]
        for axes, name, unit in zip(panels, ("seconds", "active"), (1e3, 1), strict=True):
            bars = axes.bar(where, [unit * r[name] for r in mine], 0.25, color=color, label=kind)
            axes.bar_label(bars, fmt="%.1f", fontsize=8)
    for axes, label in zip(panels, ("mean latency (ms)", "active ranks"), strict=True):
        axes.set(xlabel="float32 elements", ylabel=label)
        axes.set_xticks(range(len(sizes)), [f"{n:,}" for n in sizes])
    figure.suptitle(f"{found['ranks']} ranks, each {1e3 * found['skew']:g} ms after the one before")
    output.legend_below(figure, panels[0])
    output.save(figure, path)
