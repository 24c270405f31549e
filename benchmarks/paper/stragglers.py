"""Training with ranks that are late in turn (Figure 12 of Li et al., PPoPP 2020): synchronous, solo and majority.

Four ranks train a perceptron on handwritten digits. Before its gradient a rank sleeps for as long as
a device of its own would take: 20 to 80 ms after a base of 20 ms. The ranks change places after every step. All
methods take the same number of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import launch, output
from benchmarks.output import BLUE, GREY, ORANGE

METHODS = {f"{policy}, {scheme}": (policy, scheme) for scheme in ("Dense", "OkTopk")
           for policy in ("synchronous", "solo", "majority")}
COLORS = {"synchronous": GREY, "solo": ORANGE, "majority": BLUE}
TIMEOUT = 600.0


def measure(progress: Any, methods: Sequence[str] = tuple(METHODS), ranks: int = 4, seeds: Sequence[int] = (1, 2, 3),
            epochs: int = 8, skew: float = 0.02, density: float = 0.01) -> dict[str, Any]:
    """Return what each method reaches with each seed. skew: seconds between two ranks, and of the base."""
    settings = {"seeds": list(seeds), "epochs": epochs, "skew": skew, "density": density}
    results: list[dict[str, Any]] = []
    for name in progress(methods, "stragglers"):
        policy, scheme = METHODS[name]
        results += launch.measured(launch.horovodrun(ranks), "benchmarks.paper.stragglers_rank",
                                   {"policy": policy, "scheme": scheme, **settings}, TIMEOUT)
    return {"ranks": ranks, "methods": list(methods), **settings, "results": results}


def by_method(found: dict[str, Any], name: str) -> list[list[float]]:
    """Return the values of a figure by method, one for each seed."""
    return [[r[name] for r in found["results"] if (r["policy"], r["scheme"]) == METHODS[method]]
            for method in found["methods"]]


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Return a table with a row for each method: means over the seeds."""
    table = [["method", "steps a second", "times synchronous", "test loss", "test accuracy", "lowest to highest",
              "active ranks"]]
    rates, losses, accuracies, active = (by_method(found, name)
                                         for name in ("steps_per_second", "loss", "accuracy", "active"))
    rate = dict(zip(found["methods"], map(statistics.mean, rates), strict=True))
    for index, name in enumerate(found["methods"]):
        lowest, highest = min(accuracies[index]), max(accuracies[index])
        synchronous = rate.get(f"synchronous, {METHODS[name][1]}")
        table.append([name, f"{rate[name]:.2f}", f"{rate[name] / synchronous:.2f}" if synchronous else "-",
                      f"{statistics.mean(losses[index]):.3f}", f"{statistics.mean(accuracies[index]):.1%}",
                      f"{lowest:.1%} to {highest:.1%}", f"{statistics.mean(active[index]):.2f}"])
    return table


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw steps a second and accuracy, a bar for each method."""
    figure, panels = output.load_pyplot().subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
    for axes, name in zip(panels, ("steps_per_second", "accuracy"), strict=True):
        means = [statistics.mean(values) for values in by_method(found, name)]
        axes.barh(range(len(means)), means, color=[COLORS[METHODS[method][0]] for method in found["methods"]])
        axes.set_yticks(range(len(means)), found["methods"])
        output.label_ends(axes, means, "{:.3g}")
        axes.set_xlabel(name.replace("_", " "))
        axes.margins(x=0.15)
    panels[0].invert_yaxis()
    figure.suptitle(f"{found['ranks']} ranks, {1e3 * found['skew']:g} ms apart, in turn")
    output.save(figure, path)
