"""Weak scaling of a training step by every scheme (Figures 8, 10 and 12 of Li and Hoefler, PPoPP 2022).

A VGG-16 trains on 2 to 16 hosts at 1 Gbit/s, each with the same batch; benchmarks.cluster.training measures the
steps. Time dilation gives each rank a core. Parallel efficiency is the seconds of computation alone, in the mean of
all measurements, divided by those of the step. It needs root and iproute2.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.cluster import training
from benchmarks.cluster.hosts import in_words

SCHEMES = ("Dense", "TopkA", "TopkDSA", "GTopk", "GaussianK", "OkTopk", "StepAhead(OkTopk)")


def measure(progress: Any, hosts: Sequence[int] = (2, 4, 8, 16), schemes: Sequence[str] = SCHEMES,
            rate: str = "1gbit", model: str = "vgg16", warm_up: int = 2, steps: int = 2) -> dict[str, Any]:
    """Return seconds of a step and of its parts, by number of hosts and scheme."""
    results: list[dict[str, Any]] = []
    for count in progress(hosts, "scaling"):
        dilation = max(1, count // (os.cpu_count() or 1))
        line = ["--hosts", count, "--rate", rate, "--dilation", dilation, "--models", model, "--warm-up", warm_up,
                "--steps", steps, "--schemes", *schemes]
        arguments = training.parse_arguments([str(word) for word in line])
        results += [{**r, "hosts": count, "dilation": dilation} for r in training.measure(arguments)]
    return {"rate": rate, "model": model, "n": training.MODELS[model], "results": results}


def efficiency(found: dict[str, Any], r: dict[str, Any]) -> float:
    """Return the parallel efficiency of a result. Every rank computes the same, whatever the scheme and the hosts."""
    return statistics.mean(each["computation_alone"] for each in found["results"]) / float(r["step"])


def rows(found: dict[str, Any]) -> list[list[str]]:
    table = [["hosts", "scheme", "step, s", "computation alone, s", "parallel efficiency", "MB sent"]]
    for r in found["results"]:
        sent = "-" if r["bytes_sent"] is None else f"{r['bytes_sent'] / 1e6:.2f}"
        table.append([str(r["hosts"]), r["scheme"], f"{r['step']:.3f}", f"{r['computation_alone']:.3f}",
                      f"{efficiency(found, r):.0%}", sent])
    return table


def plot(found: dict[str, Any], path: Path) -> None:
    hosts = dict.fromkeys(f"{r['hosts']} hosts" for r in found["results"])
    series = {scheme: [100 * efficiency(found, r) for r in found["results"] if r["scheme"] == scheme]
              for scheme in dict.fromkeys(r["scheme"] for r in found["results"])}
    output.grouped_bars(path, f"{found['model']}, n = {found['n']:,}, hosts at {in_words(found['rate'])}",
                        "parallel efficiency (%)", list(hosts), series, "%.0f")
