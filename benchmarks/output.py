"""Output of every benchmark: a table on the terminal, JSON, and a plot."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GREY, BLUE, ORANGE, GREEN, RED, VIOLET = "#999999", "#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3"


def make_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with --json and --plot: runs/<name>.json and runs/<name>.png if they are not given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(f"runs/{name}.json"))
    parser.add_argument("--plot", type=Path, default=Path(f"runs/{name}.png"))
    return parser


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


def as_text(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the arguments as JSON can hold them."""
    return {name: str(value) for name, value in vars(arguments).items()}


def make_console() -> Console:
    """Return the terminal; if there is none, a console that is wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=130)


def make_table(title: str, names: Iterable[str], figures: Iterable[str]) -> Table:
    """Return an empty table.

    names: headings of columns of text, on the left. figures: headings of columns of numbers, on the right.
    """
    table = Table(title=title)
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def load_pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files; loaded late, as ranks that only measure have no use for it."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write the figure as an image, with all its axes open at the top and on the right."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def legend_below(figure: Any, axes: Any, columns: int | None = None) -> None:
    """Draw one legend for the whole figure, with the labels of these axes; in one row, if columns is None."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns or len(labels), frameon=False)


def label_ends(axes: Any, ends: Iterable[float], form: str = "{:.1f}") -> None:
    """Write the length of each horizontal bar behind it."""
    for row, end in enumerate(ends):
        axes.annotate(form.format(end), (end, row), xytext=(4, 0), textcoords="offset points", va="center")


def stacked_bars(axes: Any, rows: Sequence[str], parts: Mapping[str, Sequence[float]], colors: Mapping[str, str],
                 ) -> list[float]:
    """Draw horizontal bars of parts, the first row on top; return the length of each bar. parts: values by row."""
    ends = [0.0] * len(rows)
    for name, values in parts.items():
        axes.barh(range(len(rows)), values, left=ends, color=colors[name], label=name)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    axes.set_yticks(range(len(rows)), rows)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    return ends


def grouped_bars(path: Path, title: str, label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]],
                 form: str = "%.3g") -> None:
    """Write an image of vertical bars. label: what they measure. series: a value for each group, by name."""
    figure, axes = load_pyplot().subplots(figsize=(max(6.0, 0.45 * len(groups) * len(series)), 3.6),
                                          layout="constrained")
    width = 0.85 / len(series)
    for place, (name, values) in enumerate(series.items()):
        left = [index + width * (place - (len(series) - 1) / 2) for index in range(len(groups))]
        axes.bar_label(axes.bar(left, values, 0.9 * width, label=name), fmt=form, fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.set(title=title, ylabel=label)
    legend_below(figure, axes, columns=min(4, len(series)))
    save(figure, path)


def band(axes: Any, places: Sequence[float], columns: Sequence[Sequence[float]], color: str, **style: Any) -> None:
    """Draw a line of means, in a band from the lowest to the highest. columns: the values at each place."""
    axes.plot(places, [statistics.fmean(values) for values in columns], color=color, **style)
    axes.fill_between(places, [min(values) for values in columns], [max(values) for values in columns], color=color,
                      alpha=0.12, linewidth=0)


Line = tuple[Sequence[float], Sequence[float], Mapping[str, Any]]
"""Places, values and style."""


def draw_lines(path: Path, lines: Mapping[str, Line], **labels: Any) -> None:
    """Write a picture of lines, by their labels. labels: of the axes, as `Axes.set` takes them.

    On a logarithmic x-axis the ticks are the places of the first line; on a y-axis 1, 2, 5, 10 and so on.
    """
    figure, axes = load_pyplot().subplots(figsize=(7, 4), layout="constrained")
    for label, (places, values, style) in lines.items():
        axes.plot(places, values, label=label, **style)
    axes.set(**labels)
    if labels.get("xscale") == "log":
        places = next(iter(lines.values()))[0]
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.xaxis.set_minor_locator(load_pyplot().NullLocator())
    if labels.get("yscale") == "log":
        axes.yaxis.set_major_locator(load_pyplot().LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)
