"""Fill-in: elements of the sum of the first P ranks' top-k, over k (Ok-Topk, Sections 1 and 5.2).

TopkA keeps all of the sum, as TopkDSA does. OkTopk keeps k; the rest stays in the residuals of the ranks that had it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import BLUE, GREY, ORANGE, Line, draw_lines
from benchmarks.paper.data_parallel import train
from horovod_oktopk import OkTopk, TopkA
from horovod_oktopk.vectors.sparse import sum_of


def measure(progress: Any, ranks: int = 32, steps: int = 40, hidden: int = 256) -> dict[str, Any]:
    """Return the mean fill-in of the last half of the steps, by scheme and density, by number of ranks."""
    sizes, found = [2**power for power in range(1, ranks.bit_length())], {}
    for options in [scheme(density=density) for scheme in (TopkA, OkTopk) for density in (0.01, 0.02)]:
        title = f"{type(options).__name__}, density {100 * options.density:g} %"
        counts = [[len(sum_of([each.result.selected for each in step.results[:size]])) / step.k  # type: ignore[misc]
                   for size in sizes] for step in train(options, ranks, hidden, progress(range(steps), title))]
        found[title] = dict(zip(map(str, sizes), np.mean(counts[steps // 2:], axis=0).tolist(), strict=True))
    return {"fill_in": found}


def rows(found: dict[str, Any]) -> list[list[str]]:
    sizes = next(iter(found["fill_in"].values()))
    return [["Elements of the sum / k", *(f"{size} ranks" for size in sizes)],
            *([title, *(f"{value:.2f}" for value in values.values())] for title, values in found["fill_in"].items())]


def plot(found: dict[str, Any], path: Path) -> None:
    lines: dict[str, Line] = {
        title: ([int(size) for size in values], list(values.values()),
                {"marker": "o", "color": BLUE if "TopkA" in title else ORANGE,
                 "linestyle": "-" if "1 %" in title else "--"}) for title, values in found["fill_in"].items()}
    sizes = next(iter(lines.values()))[0]
    lines["if no index is common"] = sizes, sizes, {"color": GREY, "linestyle": ":"}
    draw_lines(path, lines, xlabel="ranks", ylabel="elements of the sum / k", xscale="log", yscale="log")
