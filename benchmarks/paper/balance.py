"""Balanced regions against equal ones, in seconds and words (Figure 7 of Li and Hoefler, PPoPP 2022).

Eight hosts at 1 Gbit/s reduce gradients whose largest elements lie all over the vector, or in three places. It needs
root and iproute2.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import launch, output
from benchmarks.cluster.hosts import check_machine, cluster, dilated, in_words

CASES = ("even", "crowded")
PARTS = ("split", "gather")
"""Split and reduce, with the agreement on regions; balancing and allgatherv."""


def measure(progress: Any, hosts: int = 8, rate: str = "1gbit", n: int = 14_728_266, density: float = 0.01,
            steps: int = 10) -> dict[str, Any]:
    """Return seconds and words of each part of an allreduce, by case and split."""
    check_machine(hosts, rate, n)
    dilation = max(1, hosts // (os.cpu_count() or 1))
    results: list[dict[str, Any]] = []
    for case in progress(CASES, "balance"):
        settings = {"case": case, "n": n, "density": density, "warm_up": 2, "steps": steps}
        with cluster(hosts, dilated(rate, dilation)) as emulated:
            results += launch.measured(emulated.mpirun(), "benchmarks.paper.balance_rank", settings, 600.0)
    for r in results:
        r.update({name: r[name] / dilation for name in r if name.endswith("seconds")})
    return {"hosts": hosts, "rate": rate, "n": n, "dilation": dilation, "results": results}


def rows(found: dict[str, Any]) -> list[list[str]]:
    parts = [f"{part}, {unit}" for part in PARTS for unit in ("ms", "words / k")]
    table = [["selections", "split", *parts, "allreduce, ms"]]
    for r in found["results"]:
        figures = [figure for part in PARTS
                   for figure in (f"{1e3 * r[f'{part}_seconds']:.1f}", f"{r[f'{part}_words'] / r['k']:.2f}")]
        table.append([r["case"], r["split"], *figures, f"{1e3 * r['seconds']:.1f}"])
    return table


def plot(found: dict[str, Any], path: Path) -> None:
    series = {split: [1e3 * r[f"{part}_seconds"] for r in found["results"] if r["split"] == split for part in PARTS]
              for split in ("balanced", "naive")}
    output.grouped_bars(path, f"{found['hosts']} hosts at {in_words(found['rate'])}, n = {found['n']:,}",
                        "ms of the slowest rank", [f"{case}: {part}" for case in CASES for part in PARTS], series)
