"""Weak scaling of a training step by every scheme (Figures 8, 10 and 12 of Li and Hoefler, PPoPP 2022).

A VGG-16 trains on 2 to 16 hosts at 1 Gbit/s, each with the same batch; benchmarks.cluster.training measures the
steps. Time dilation gives each rank a core. Parallel efficiency is the seconds of computation alone divided by those
of the step. It needs root and iproute2.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.cluster import training
from benchmarks.cluster.hosts import in_words
from benchmarks.cluster.jobs import COLORS

SCHEMES = ("Dense", "TopkA", "TopkDSA", "GTopk", "GaussianK", "OkTopk", "StepAhead(OkTopk)")
HOSTS = (2, 4, 8, 16)
BLACK, RED = "#222222", "#c44e52"
DENSE = {"Dense": BLACK, "Dense, ring": "#aaaaaa"}


def measure(progress: Any, hosts: Sequence[int] = HOSTS, schemes: Sequence[str] = SCHEMES, rate: str = "1gbit",
            model: str = "vgg16", warm_up: int = 3, steps: int = 3) -> dict[str, Any]:
    """Return seconds of a step and of its parts, by number of hosts and scheme."""
    results: list[dict[str, Any]] = []
    for count in progress(hosts, "scaling"):
        dilation = max(1, count // (os.cpu_count() or 1))
        line = ["--hosts", count, "--rate", rate, "--dilation", dilation, "--models", model, "--warm-up", warm_up,
                "--steps", steps, "--schemes", *schemes]
        arguments = training.parse_arguments([str(word) for word in line])
        results += [{**r, "hosts": count, "dilation": dilation, "efficiency": r["computation_alone"] / r["step"]}
                    for r in training.measure(arguments)]
    return {"rate": rate, "model": model, "n": training.MODELS[model], "results": results}


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Return a table with a row for each number of hosts and scheme."""
    table = [["hosts", "scheme", "step, s", "computation alone, s", "parallel efficiency", "MB sent"]]
    for r in found["results"]:
        sent = "-" if r["bytes_sent"] is None else f"{r['bytes_sent'] / 1e6:.2f}"
        table.append([str(r["hosts"]), r["scheme"], f"{r['step']:.3f}", f"{r['computation_alone']:.3f}",
                      f"{r['efficiency']:.0%}", sent])
    return table


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw seconds and parallel efficiency over the hosts, a line for each scheme."""
    figure, panels = output.load_pyplot().subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for scheme in dict.fromkeys(r["scheme"] for r in found["results"]):
        mine = [r for r in found["results"] if r["scheme"] == scheme]
        color = DENSE.get(scheme, COLORS.get(scheme, RED))
        for axes, name in zip(panels, ("step", "efficiency"), strict=True):
            axes.plot([r["hosts"] for r in mine], [r[name] for r in mine], marker="o", color=color, label=scheme)
    hosts = sorted({r["hosts"] for r in found["results"]})
    for axes, label in zip(panels, ("seconds of a step", "parallel efficiency"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(hosts, [str(count) for count in hosts])
        axes.set(xlabel="hosts", ylabel=label)
        axes.grid(alpha=0.25)
    panels[0].set_yscale("log")
    figure.suptitle(f"{found['model']}, n = {found['n']:,}, hosts at {in_words(found['rate'])}")
    output.legend_below(figure, panels[0], columns=4)
    output.save(figure, path)
