"""Age of a threshold: elements that pass the exact threshold of some steps ago, over k (Ok-Topk, Section 3.1.3).

The residuals are those of exact selection at density 1 %.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import BLUE, GREY, ORANGE, Line, draw_lines
from benchmarks.paper.data_parallel import passing, train
from horovod_oktopk import OkTopk
from horovod_oktopk.vectors.sparse import sum_of

AGES = (1, 2, 4, 8, 16, 32, 64, 128)


def measure(progress: Any, ranks: int = 8, steps: int = 400, hidden: int = 256) -> dict[str, Any]:
    """Return the elements that pass over k: local (of the mean rank) and global, by age, by step from the age on."""
    found: dict[str, Any] = {"ranks": ranks, "steps": steps, "local": {}, "global": {}}
    before: deque[tuple[list[float], float]] = deque(maxlen=max(AGES))
    for step in train(OkTopk(), ranks, hidden, progress(range(steps), "age")):
        total: Any = sum_of([each.result.selected for each in step.results])  # type: ignore[misc]
        for age in (age for age in AGES if age <= len(before)):
            local, global_ = before[-age]
            passed = [passing(*each) for each in zip(step.accumulated, local, strict=True)]
            found["local"].setdefault(str(age), []).append(float(np.mean(passed)) / step.k)
            found["global"].setdefault(str(age), []).append(passing(total.values, global_) / step.k)
        thresholds = [each.report.local_threshold for each in step.results]
        before.append((thresholds, step.results[0].report.global_threshold))
    return found


def deviations(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the mean deviation from k in percent: of all steps and of the last half, by age."""
    return {f"{side}, {part}": {age: 100 * float(np.mean(np.abs(np.array(values[-last:]) - 1)))
                                for age, values in found[side].items()} for side in ("local", "global")
            for part, last in (("all steps", found["steps"]), ("last half", found["steps"] // 2))}


def rows(found: dict[str, Any]) -> list[list[str]]:
    columns = deviations(found)
    return [["Age in steps", *columns],
            *([age, *(f"{values[age]:.1f} %" for values in columns.values())] for age in found["local"])]


def plot(found: dict[str, Any], path: Path) -> None:
    lines: dict[str, Line] = {
        title: ([int(age) for age in values], list(values.values()),
                {"marker": "o", "color": BLUE if "local" in title else ORANGE,
                 "linestyle": "-" if "half" in title else "--"}) for title, values in deviations(found).items()}
    lines["the paper: below 11 %"] = (1, max(AGES)), (11, 11), {"color": GREY}
    draw_lines(path, lines, xlabel="age of the threshold in steps", ylabel="mean deviation from k (%)",
               xscale="log", yscale="log")
