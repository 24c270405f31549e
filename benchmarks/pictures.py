"""Draws the pictures of the documentation that no other program draws: a step's seconds, and two diagrams.

    .venv/bin/python -m benchmarks.pictures      # from docs/data, into docs/images
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

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
            axes.annotate(f"{middle:.2g}" if middle < 10 else f"{middle:.1f}", (place, max(found)), xytext=(0, 3),
                          textcoords="offset points", ha="center")
        axes.set_xticks(range(len(SCHEMES)), ["dense", "dense,\nring", "OkTopk", "StepAhead\n(OkTopk)"])
        axes.set_title(title)
        axes.margins(y=0.12)
    panels[0].set_ylabel("seconds of a step")
    figure.suptitle("A training step of a VGG-16 on 8 hosts: medians of three runs, and from lowest to highest")
    save(figure, DOCS / "images" / "training_steps.png")


def draw_phases() -> None:
    """Draw the two phases of Ok-Topk for four ranks: split and reduce, then the allgather of the global top-k."""
    figure, axes = load_pyplot().subplots(figsize=(11, 4.4), layout="constrained")
    for rank, color in enumerate(RANKS):
        for region, owner in enumerate(RANKS):
            cell(axes, region, 3 - rank, owner, "")
            for place in range(3):
                tick(axes, region + (0.18, 0.44, 0.75)[place] + 0.04 * rank, 3 - rank)
        axes.text(-0.15, 3.4 - rank, f"rank {rank}", ha="right", va="center", color=color, weight="bold")
        cell(axes, 6.3 + rank * 0, 3 - rank, color, f"sum of region {rank},\nits largest", width=1.7)
        for region, owner in enumerate(RANKS):
            cell(axes, 10 + 0.55 * region, 3 - rank, owner, "", width=0.55)
        for source in range(4):
            arrow(axes, (4.1, 3.4 - source), (6.2, 3.4 - rank), color)
            arrow(axes, (8.1, 3.4 - source), (9.9, 3.4 - rank), RANKS[source])
    for x, text in ((2, "Each rank selects its k largest elements (marks)."),
                    (5.15, "1. Split and reduce:\neach region goes to its owner"), (7.15, "The owner adds up,\nand keeps the largest"),
                    (9, "2. Balance and\nallgather"), (11.1, "All ranks have\nthe same update")):
        axes.text(x, 4.15, text, ha="center", va="bottom", fontsize=9)
    axes.set(xlim=(-1, 12.4), ylim=(-0.2, 5))
    axes.axis("off")
    save(figure, DOCS / "images" / "phases.png")


def cell(axes: Any, x: float, y: float, color: str, text: str, width: float = 1.0) -> None:
    axes.barh(y + 0.4, width, left=x, height=0.7, color=color, alpha=0.35, edgecolor="black", linewidth=0.8)
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", fontsize=8)


def tick(axes: Any, x: float, y: float) -> None:
    axes.plot([x, x], [y + 0.12, y + 0.68], color="black", linewidth=1.6)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color, "alpha": 0.8})


def draw_timeline() -> None:
    """Draw two steps of StepAhead: the exchange of one runs while the next is computed."""
    figure, axes = load_pyplot().subplots(figsize=(11, 2.6), layout="constrained")
    parts = (("forward, backward", 3.2, GREY), ("apply", 0.6, GREEN), ("optimizer's\nstep", 0.9, ORANGE),
             ("select", 0.6, RED))
    start = 0.0
    for step in ("t", "t + 1"):
        begun = start
        for name, seconds, color in parts:
            bar(axes, 1, start, seconds, color, name)
            start += seconds
        axes.text((begun + start) / 2, 1.5, f"step {step}", ha="center", weight="bold")
        axes.axvline(start, ymin=0.05, ymax=0.85, color="black", linewidth=0.8, linestyle=":")
        bar(axes, 0, start, 2.5, BLUE, f"exchange of step {step}")
        start += 0.0
    axes.set_yticks([0, 1], ["network (a thread)", "program"])
    axes.set(xlim=(0, start + 3.0), ylim=(-0.5, 1.8), xticks=[], xlabel="time")
    save(figure, DOCS / "images" / "timeline.png")


def bar(axes: Any, row: int, start: float, seconds: float, color: str, text: str) -> None:
    axes.barh(row, seconds, left=start, height=0.7, color=color, alpha=0.55, edgecolor="black", linewidth=0.8)
    axes.text(start + seconds / 2, row, text, ha="center", va="center", fontsize=8)


def main() -> None:
    draw_training_steps()
    draw_phases()
    draw_timeline()


if __name__ == "__main__":
    main()
