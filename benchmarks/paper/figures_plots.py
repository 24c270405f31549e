"""Plots of figures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import BLUE, GREEN, GREY, ORANGE, RED, load_pyplot, save
from benchmarks.paper.figures_tables import Series, later

SPLITS = {"equal split": GREY, "averaged cuts (paper)": ORANGE, "OkTopk": BLUE}
GATHERS = {"direct": GREY, "always balanced": ORANGE, "OkTopk": BLUE}


def plot(results: dict[str, Any], path: Path) -> None:
    figure, panels = load_pyplot().subplots(3, 2, figsize=(12, 12.5), layout="constrained")
    first_density, first = next(iter(results["training"].items()))
    plot_xi(results, panels[0, 0])
    plot_fill_in(results, panels[0, 1])
    plot_selected(first, "local", panels[1, 0])
    plot_selected(first, "global", panels[1, 1])
    cases = {f"training,\ndensity {density}": training["series"] for density, training in results["training"].items()}
    cases |= {case.replace(" clusters", "\nclusters").replace(" for", "\nfor").replace(" in", "\nin"): series
              for case, series in results["skewed"].items()}
    plot_bars(cases, "split: ", SPLITS, panels[2, 0])
    plot_bars(cases, "gather: path: ", GATHERS, panels[2, 1])
    panels[2, 0].set_title("Split and reduce: words that the most loaded rank receives")
    panels[2, 1].set_title("Balance and allgatherv: words that pass one link of a ring")
    for axes in panels.ravel():
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(f"A character LSTM, n = {first['n']:,}, {results['ranks']} ranks; middle row: density "
                    f"{first_density}")
    save(figure, path, dpi=110)


def plot_xi(results: dict[str, Any], axes: Any) -> None:
    for (density, training), color in zip(results["training"].items(), (BLUE, ORANGE, GREEN),
                                          strict=False):
        values = training["series"]["xi: exact"]
        axes.plot(range(1, len(values) + 1), values, color=color, label=f"density {density}")
    axes.axhline(results["ranks"], color=GREY, linestyle="--", label="P")
    axes.set(title="ξ of Assumption 1", xlabel="step", ylim=(0, None))


def plot_fill_in(results: dict[str, Any], axes: Any) -> None:
    lines = {f"OkTopk's selections, density {density}": {
        name.removeprefix("fill-in: "): values for name, values in training["series"].items()
        if name.startswith("fill-in: ")} for density, training in results["training"].items()}
    lines[f"TopkDSA, density {results['fill_in']['density']:g}"] = results["fill_in"]["series"]
    for (name, series), marker in zip(lines.items(), "osd^v", strict=False):
        axes.plot([int(count) for count in series], [later(values) for values in series.values()], marker=marker,
                  label=name)
    ends = [int(count) for count in results["fill_in"]["series"]]
    axes.plot(ends, ends, color=GREY, linestyle="--", label="all different")
    axes.set(title="Fill-in: elements of the sum / k (second half)", xlabel="ranks", xscale="log", yscale="log")
    axes.set_xticks(ends, ends)
    axes.set_yticks(ends, ends)
    axes.minorticks_off()


def plot_selected(training: dict[str, Any], side: str, axes: Any) -> None:
    series, k = training["series"], training["k"]
    ours = "OkTopk, most" if side == "local" else "OkTopk"
    lines = [("threshold reused (paper), on the same acc", "reuse", ORANGE),
             ("threshold reused (paper), residual of its own", "reuse, own residual", RED),
             ("Gaussiank's estimate", "Gaussiank", GREEN), ("OkTopk", ours, BLUE)]
    axes.axhline(k, color="black", linewidth=1, linestyle="--", label=f"k = {k:,}")
    for label, name, color in lines:
        values = series.get(f"{side}: {name}", [])
        if values:
            axes.plot(range(1, len(values) + 1), np.maximum(values, 1), color=color, label=label)
    axes.set(title=f"Elements selected: {side} top-k", xlabel="step", yscale="log")


def plot_bars(cases: dict[str, Series], prefix: str, names: dict[str, str], axes: Any) -> None:
    width = 0.8 / len(names)
    for number, (name, color) in enumerate(names.items()):
        values = [float(np.mean(series[prefix + name])) for series in cases.values()]
        places = np.arange(len(cases)) + (number - 1) * width
        axes.bar(places, values, width, color=color, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.1f}", (place, value), ha="center", va="bottom", fontsize=8)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.margins(y=0.3)  # room for the legend
    axes.set_xticks(range(len(cases)), cases, fontsize=9)
    axes.set_ylabel("over 2k(P−1)/P (mean of the steps)")
