"""ξ of Assumption 1 (Ok-Topk, Figure 5): ‖Topk(Σ acc) − Topk(Σ Topk(acc))‖ / ‖Σ gradient‖, at every step.

1/P and the learning rate cancel. The second vector is the update that the package applies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import BLUE, GREY, ORANGE, Line, draw_lines
from benchmarks.paper.data_parallel import Step, dense, train
from horovod_oktopk import OkTopk
from horovod_oktopk.kernels import KERNELS


def measure(progress: Any, ranks: int = 8, steps: int = 400, hidden: int = 256) -> dict[str, Any]:
    """Return ξ by step, by density."""
    found = {f"{100 * density:g} %": [of_step(step) for step in train(
        OkTopk(density=density), ranks, hidden, progress(range(steps), f"xi, {density:.0%}"))]
        for density in (0.01, 0.02)}
    return {"ranks": ranks, "xi": found}


def of_step(step: Step) -> float:
    total = np.sum(step.accumulated, axis=0)
    wanted = np.where(np.abs(total) >= np.float32(KERNELS.kth_magnitude(total, step.k)), total, 0)
    difference = wanted - dense(step.results[0].result.update, len(total))
    return float(np.linalg.norm(difference) / np.linalg.norm(np.sum(step.gradients, axis=0)))


def rows(found: dict[str, Any]) -> list[list[str]]:
    return [["Density", "Mean of the steps", "Mean of the last half", "Largest"], *(
        [density, f"{np.mean(values):.2f}", f"{np.mean(values[len(values) // 2:]):.2f}", f"{max(values):.2f}"]
        for density, values in found["xi"].items())]


def plot(found: dict[str, Any], path: Path) -> None:
    lines: dict[str, Line] = {f"density {density}": (range(1, len(values) + 1), values, {"color": color})
                              for (density, values), color in zip(found["xi"].items(), (BLUE, ORANGE), strict=True)}
    lines["P, the number of ranks"] = (1, len(found["xi"]["1 %"])), [found["ranks"]] * 2, {"color": GREY}
    draw_lines(path, lines, xlabel="step", ylabel="ξ of Assumption 1", ylim=(0, None))
