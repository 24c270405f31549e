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

SCHEMES, POLICIES = ("Dense", "OkTopk"), ("synchronous", "solo", "majority")


def measure(progress: Any, schemes: Sequence[str] = SCHEMES, ranks: int = 4, seeds: Sequence[int] = (1, 2, 3),
            steps: int = 180, skew: float = 0.02, density: float = 0.01) -> dict[str, Any]:
    """Return what each method reaches with each seed. skew: seconds between two ranks, and of the base."""
    settings = {"seeds": list(seeds), "steps": steps, "skew": skew, "density": density}
    methods = [{"policy": policy, "scheme": scheme} for scheme in schemes for policy in POLICIES]
    results = [{**method, "runs": launch.measured(launch.horovodrun(ranks), "benchmarks.paper.stragglers_rank",
                                                  {**method, **settings}, 600.0)}
               for method in progress(methods, "stragglers")]
    return {"ranks": ranks, "schemes": list(schemes), **settings, "results": results}


def mean(result: dict[str, Any], name: str) -> float:
    """Return the mean over seeds of a figure of one method."""
    return statistics.mean(run[name] for run in result["runs"])


def rows(found: dict[str, Any]) -> list[list[str]]:
    table = [["scheme", "policy", "steps a second", "times synchronous", "test loss", "test accuracy",
              "lowest to highest"]]
    for r in found["results"]:
        base = next(o for o in found["results"] if (o["scheme"], o["policy"]) == (r["scheme"], "synchronous"))
        rate, accuracies = mean(r, "steps_per_second"), [run["accuracy"] for run in r["runs"]]
        table.append([r["scheme"], r["policy"], f"{rate:.2f}", f"{rate / mean(base, 'steps_per_second'):.2f}",
                      f"{mean(r, 'loss'):.3f}", f"{mean(r, 'accuracy'):.1%}",
                      f"{min(accuracies):.1%} to {max(accuracies):.1%}"])
    return table


def plot(found: dict[str, Any], path: Path) -> None:
    series = {policy: [mean(r, "steps_per_second") for r in found["results"] if r["policy"] == policy]
              for policy in POLICIES}
    output.grouped_bars(path, f"{found['ranks']} ranks, {1e3 * found['skew']:g} ms apart, in turn", "steps a second",
                        found["schemes"], series)
