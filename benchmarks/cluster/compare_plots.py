"""Plots of compare.py: bars at one point, and lines over a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import in_words
from benchmarks.cluster.jobs import COLORS, Result
from benchmarks.output import BLUE, ORANGE, label_ends, legend_below, load_pyplot, save

HOSTS, RATES = (2, 4, 8, 16), ("100mbit", "1gbit", "10gbit")
"""Hosts and rates of a sweep, which varies the density, too."""


@dataclass(frozen=True)
class Point:
    """Settings that are measured together."""

    hosts: int
    rate: str
    densities: tuple[float, ...]


def at(results: list[Result], point: Point, density: float) -> list[Result]:
    """Return the results of one point and density; dense ones have no density."""
    return [r for r in results if (r["hosts"], r["rate"]) == (point.hosts, point.rate)
            and r["density"] in (None, density)]


def plot_point(results: list[Result], point: Point, density: float, path: Path) -> None:
    """Plot bars of the seconds and megabytes at one point."""
    found = at(results, point, density)
    figure, panels = load_pyplot().subplots(1, 2, figsize=(10, 0.5 + 0.36 * len(found)), layout="constrained",
                                            sharey=True)
    names = [r["scheme"] for r in found]
    for axes, key, unit, factor in ((panels[0], "seconds", "seconds", 1.0),
                                    (panels[1], "interface_bytes", "megabytes that a rank sends", 1e-6)):
        values = [r[key] * factor for r in found]
        axes.barh(names, values, color=[ORANGE if name.startswith("OkTopk") else BLUE for name in names])
        label_ends(axes, values, "{:.3g}")
        axes.set_xlabel(unit)
        axes.margins(x=0.15)
    panels[0].invert_yaxis()
    figure.suptitle(f"One allreduce, n = {found[0]['n']:,}, density {density:.1%}, {point.hosts} hosts at "
                    f"{in_words(point.rate)}")
    save(figure, path)


@dataclass(frozen=True)
class Sweep:
    """Results of points that differ from `base` in one thing; density: where it is not varied."""

    results: list[Result]
    base: Point
    density: float

    def over_hosts(self, scheme: str, key: str) -> list[float]:
        return [self._value(replace(self.base, hosts=hosts), self.density, scheme, key) for hosts in HOSTS]

    def over_rates(self, scheme: str) -> list[float]:
        return [self._value(replace(self.base, rate=rate), self.density, scheme, "seconds") for rate in RATES]

    def over_densities(self, scheme: str) -> list[float]:
        return [self._value(self.base, density, scheme, "seconds") for density in self.base.densities]

    def _value(self, point: Point, density: float, scheme: str, key: str) -> float:
        """Return a measured value, or NaN if there is none."""
        found = [r for r in at(self.results, point, density)
                 if ("dense" in r["scheme"] if scheme == "best dense" else r["scheme"] == scheme)]
        return float(min(found, key=lambda r: r["seconds"])[key]) if found else float("nan")


def plot_sweep(results: list[Result], base: Point, density: float, path: Path) -> None:
    """Plot seconds against hosts, density and rate, and bytes against hosts."""
    figure, grid = load_pyplot().subplots(2, 2, figsize=(10, 7), layout="constrained")
    panels = grid.ravel()
    drawn = [name for name in COLORS if name == "best dense" or any(r["scheme"] == name for r in results)]
    draw_lines(panels, Sweep(results, base, density), drawn)
    labels = ("hosts", f"rate, {base.hosts} hosts", f"density, {base.hosts} hosts", "hosts")
    for index, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        axes.set(yscale="log", xlabel=label,
                 ylabel="megabytes that a rank sends" if index == 3 else "seconds of one allreduce")
    for axes in (panels[0], panels[3]):
        axes.set_xscale("log", base=2)
        axes.set_xticks(HOSTS, HOSTS)
    legend_below(figure, panels[0], columns=-(-len(drawn) // 2))
    figure.suptitle(f"One allreduce, n = {results[0]['n']:,}; where not varied: density {density:.0%}, "
                    f"{in_words(base.rate)}")
    save(figure, path)


def draw_lines(panels: Sequence[Any], sweep: Sweep, schemes: list[str]) -> None:
    for name in schemes:
        style = {"color": COLORS[name], "label": name, "marker": "o", "linestyle": "--" if "dense" in name else "-"}
        panels[0].plot(HOSTS, sweep.over_hosts(name, "seconds"), **style)
        panels[1].plot([in_words(rate) for rate in RATES], sweep.over_rates(name), **style)
        panels[2].plot([f"{density:.1%}" for density in sweep.base.densities], sweep.over_densities(name), **style)
        panels[3].plot(HOSTS, [sent / 1e6 for sent in sweep.over_hosts(name, "interface_bytes")], **style)
