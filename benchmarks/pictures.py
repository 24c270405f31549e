"""Draws the pictures of the documentation that no other program draws: a step's seconds, and two diagrams.

    .venv/bin/python -m benchmarks.pictures      # from docs/data, into docs/images
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, load_pyplot, save

DOCS = Path(__file__).parents[1] / "docs"
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
SCHEMES = {"Dense": GREY, "Dense, ring": "#cccccc", "OkTopk": ORANGE, "StepAhead(OkTopk)": BLUE}
RANKS = [BLUE, ORANGE, GREEN, VIOLET]
"""Colours of the regions' owners in the diagram of the phases."""


def draw_training_steps() -> None:
    """Draw bars of the runs' medians, with whiskers from the lowest run to the highest."""
    runs = json.loads((DOCS / "data" / "training_steps.json").read_text())
    figure, panels = load_pyplot().subplots(1, len(RATES), figsize=(11, 3.4), layout="constrained")
    for axes, (rate, title) in zip(panels, RATES.items(), strict=True):
        for place, (scheme, color) in enumerate(SCHEMES.items()):
            found = [result["step"] for run in runs if run["rate"] == rate for result in run["results"]
                     if result["scheme"] == scheme]
            middle = statistics.median(found)
            axes.bar(place, middle, color=color, yerr=[[middle - min(found)], [max(found) - middle]], capsize=5)
            axes.annotate(f"{middle:.2f}" if middle < 10 else f"{middle:.1f}", (place, max(found)), xytext=(0, 3),
                          textcoords="offset points", ha="center")
        axes.set_xticks(range(len(SCHEMES)), ["dense", "dense,\nring", "OkTopk", "StepAhead\n(OkTopk)"])
        axes.set_title(title)
        axes.margins(y=0.12)
    panels[0].set_ylabel("seconds of a step")
    figure.suptitle("A training step of a VGG-16 on 8 hosts: medians of three runs, and from lowest to highest")
    save(figure, DOCS / "images" / "training_steps.png")


def draw_phases() -> None:
    """Draw the two phases of Ok-Topk on a small example: four ranks, four regions, k = 4."""
    n, k = 24, 4
    drawn = np.random.default_rng(3).standard_normal((4, n))
    chosen = np.array([np.where(np.abs(row) >= np.sort(np.abs(row))[-k], row, 0) for row in drawn])
    total = chosen.sum(axis=0)
    update = np.where(np.abs(total) >= np.sort(np.abs(total))[-k], total, 0)
    figure, axes = load_pyplot().subplots(figsize=(12, 4.2), layout="constrained")
    for rank, color in enumerate(RANKS):
        axes.text(-0.2, 3.4 - rank, f"rank {rank}", ha="right", va="center", color=color, weight="bold")
        mine = slice(n // 4 * rank, n // 4 * (rank + 1))
        for region in range(4):
            part = slice(n // 4 * region, n // 4 * (region + 1))
            cell(axes, region, 3 - rank, RANKS[region], chosen[rank, part])
            cell(axes, 10.4 + region, 3 - rank, RANKS[region], update[part])
            if region != rank:
                arrow(axes, (4.1, 3.4 - rank), (6.0, 3.4 - region), RANKS[region])
                arrow(axes, (8.4, 3.4 - rank), (10.3, 3.4 - region), color)
        cell(axes, 6.1, 3 - rank, color, total[mine])
        cell(axes, 7.3, 3 - rank, color, update[mine])
    for x, text in ((2, "each rank's k largest elements"),
                    (5.05, "1. split and reduce:\nsend to the\nregion's owner"),
                    (6.6, "the owner\nadds up"), (7.8, "k largest\nof all sums"),
                    (9.35, "2. balance and\nallgather:\nsend to all"), (12.4, "the update, the same on all ranks")):
        axes.text(x, 4.1, text, ha="center", va="bottom", fontsize=9)
    axes.set(xlim=(-1.2, 14.5), ylim=(-0.1, 5.1))
    axes.axis("off")
    save(figure, DOCS / "images" / "phases.png")


def cell(axes: Any, x: float, y: float, color: str, elements: Any) -> None:
    """Draw one region, with a mark for each element that is not zero."""
    axes.barh(y + 0.4, 1, left=x, height=0.7, color=color, alpha=0.3, edgecolor="black", linewidth=0.8)
    for place in np.flatnonzero(elements):
        mark = x + (place + 0.5) / len(elements)
        axes.plot([mark, mark], [y + 0.12, y + 0.68], color="black", linewidth=2.5)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color, "alpha": 0.8})


def draw_timeline() -> None:
    """Draw two steps of StepAhead: the exchange of one runs while the next is computed, and is applied there."""
    figure, axes = load_pyplot().subplots(figsize=(12, 2.7), layout="constrained")
    parts = (("forward and backward pass", 3.4, GREY), ("apply", 0.7, GREEN), ("optimizer's step", 1.4, ORANGE),
             ("select", 0.7, RED))
    length = sum(seconds for _, seconds, _ in parts)
    for step, before in enumerate(("t − 1", "t", "t + 1")):
        start = step * length
        bar(axes, 0, start, 2.6, BLUE, f"exchange of step {before}")
        if step == 2:
            break
        axes.text(start + length / 2, 1.5, f"step {('t', 't + 1')[step]}", ha="center", weight="bold")
        for name, seconds, color in parts:
            bar(axes, 1, start, seconds, color, name)
            start += seconds
        arrow(axes, (step * length + 2.6, 0.2), (step * length + 3.7, 0.62), "black")
        arrow(axes, (start - 0.3, 0.62), (start + 0.02, 0.37), "black")
    axes.set_yticks([0, 1], ["network\n(a thread)", "program"])
    axes.set(xlim=(0, 2 * length + 2.7), ylim=(-0.5, 1.8), xticks=[], xlabel="time")
    save(figure, DOCS / "images" / "timeline.png")


def bar(axes: Any, row: int, start: float, seconds: float, color: str, text: str) -> None:
    axes.barh(row, seconds, left=start, height=0.7, color=color, alpha=0.55, edgecolor="black", linewidth=0.8)
    axes.text(start + seconds / 2, row, text, ha="center", va="center", fontsize=9)


def main() -> None:
    draw_training_steps()
    draw_phases()
    draw_timeline()


if __name__ == "__main__":
    main()
