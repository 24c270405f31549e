"""Tables of figures.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.output import make_table

Series = dict[str, list[float]]
"""Values by step, by name."""


def later(values: Sequence[float]) -> float:
    """The mean of the second half."""
    return float(np.mean(values[len(values) // 2:]))


def deviation(values: Sequence[float], k: int) -> float:
    """The mean distance from k, as a share of k."""
    return float(np.mean(np.abs(np.array(values) / k - 1)))


def show(results: dict[str, Any], console: Console) -> None:
    for density, training in results["training"].items():
        series, k = training["series"], training["k"]
        losses = training["losses"]
        table = make_table(f"Training: {results['ranks']} ranks, n = {training['n']:,}, density {density}, "
                           f"k = {k:,}; loss {losses[0]:.2f} to {losses[-1]:.2f}", [""],
                           ["first", "least", "mean", "most", "second half", "mean deviation from k"])
        for name, values in series.items():
            counted = name.startswith(("local", "global"))
            shown = [values[0], min(values), float(np.mean(values)), max(values), later(values)]
            table.add_row(name, *(f"{value:,.0f}" if counted else f"{value:.2f}" for value in shown),
                          f"{deviation(values, k):.1%}" if counted else "")
        console.print(table)
    show_skewed(results["skewed"], console)
    fill = results["fill_in"]
    means = ", ".join(f"{count} ranks {later(values):.2f}" for count, values in fill["series"].items())
    console.print(f"Fill-in of TopkDSA, elements of the sum over k, density {fill['density']:g}, mean of the second "
                  f"half: {means}")


def show_skewed(skewed: dict[str, Series], console: Console) -> None:
    table = make_table("Skewed gradients: means of the steps, over the ideal", [""], skewed)
    for name in next(iter(skewed.values())):
        table.add_row(name, *(f"{np.mean(series[name]):.2f}" for series in skewed.values()))
    console.print(table)
