"""Elements selected, over k (Ok-Topk, Figure 6), at every step of one training at density 1 %.

Every rule but GaussianK's first estimate has residuals of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import BLUE, GREEN, ORANGE, RED, VIOLET, Line, draw_lines
from benchmarks.paper.data_parallel import Reduced, Step, Vector, passing, train
from horovod_oktopk import GaussianK, OkTopk
from horovod_oktopk.kernels import KERNELS
from horovod_oktopk.schemes.gaussiank import gaussian_threshold
from horovod_oktopk.vectors.sparse import SparseVector, sum_of

COLORS = {"OkTopk": BLUE, "OkTopk, reuse": GREEN, "the paper's reuse": RED, "GaussianK": VIOLET,
          "GaussianK's first estimate": ORANGE}


class PaperReuse:
    """The paper's rule: both thresholds are evaluated every 32 steps, and reused in between, unguarded."""

    _residuals: Any = 0
    _local: Any = ()
    _global, _steps = 0.0, 0

    def counts(self, gradients: list[Vector], k: int) -> tuple[float, int]:
        """Take a step. Return how many elements the mean rank selects, and how many are kept of the sum."""
        self._residuals = self._residuals + np.array(gradients)
        is_due, self._steps = self._steps % 32 == 0, self._steps + 1
        if is_due:
            self._local = [KERNELS.kth_magnitude(acc, k) for acc in self._residuals]
        chosen = [SparseVector(found := np.flatnonzero(np.abs(acc) >= np.float32(threshold)), acc[found])
                  for acc, threshold in zip(self._residuals, self._local, strict=True)]
        total = sum_of(chosen)
        if is_due:
            self._global = KERNELS.kth_magnitude(total.values, k)
        kept = total.passing(self._global)
        for acc, mine in zip(self._residuals, chosen, strict=True):
            acc[mine.indices[mine.positions_in(kept)]] = 0
        return float(np.mean([len(mine) for mine in chosen])), len(kept)


def measure(progress: Any, ranks: int = 8, steps: int = 400, hidden: int = 256) -> dict[str, Any]:
    """Return the elements selected over k: local (of the mean rank) and global, by rule, by step."""
    found: dict[str, Any] = {"ranks": ranks, "local": {}, "global": {}}
    paper = PaperReuse()
    for step in train(OkTopk(), ranks, hidden, progress(range(steps), "selected"), OkTopk(selection="reuse"),
                      GaussianK()):
        reuse, gaussian = step.beside
        counts = (_counts(step.results), _counts(reuse), paper.counts(step.gradients, step.k), _counts(gaussian)[:1],
                  (_estimate(step),))
        for rule, sides in zip(COLORS, counts, strict=True):
            for side, count in zip(("local", "global"), sides, strict=False):
                found[side].setdefault(rule, []).append(count / step.k)
    return found


def _counts(results: list[Reduced]) -> tuple[float, ...]:
    return float(np.mean([each.report.local_selected for each in results])), results[0].report.global_selected


def _estimate(step: Step) -> float:
    return float(np.mean([passing(acc, gaussian_threshold(float(acc.mean()), float(acc.std()), step.k / len(acc)))
                          for acc in step.accumulated]))


def rows(found: dict[str, Any]) -> list[list[str]]:
    return [["Selected / k", "Least", "Most", "Mean deviation from k", "Of the last half"],
            *([f"{rule}, {side}", f"{min(values):.2f}", f"{max(values):.2f}",
               *(f"{np.mean(np.abs(np.array(part) - 1)):.1%}" for part in (values, values[len(values) // 2:]))]
              for side in ("local", "global") for rule, values in found[side].items())]


def plot(found: dict[str, Any], path: Path) -> None:
    lines: dict[str, Line] = {
        f"{rule}, {side}": (range(1, len(values) + 1), values, {"color": COLORS[rule], "linestyle": style})
        for side, style in (("local", "-"), ("global", ":")) for rule, values in found[side].items()}
    draw_lines(path, lines, xlabel="step", ylabel="elements selected / k", yscale="log")
