"""Latency of partial allreduces where ranks come one after the other (Figures 8 and 9 of Li et al., PPoPP 2020).

    .venv/bin/python -m benchmarks.stragglers.latency

Rank i of 8 comes i times 20 ms after a barrier, 64 times; its latency is from there to its result. MPI's allreduce
waits for the last rank, majority for one that is drawn, solo for none.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import launch, output
from benchmarks.output import BLUE, GREY, ORANGE

KINDS = {"MPI_Allreduce": GREY, "majority": BLUE, "solo": ORANGE}
TIMEOUT = 1800.0
Result = dict[str, Any]


def measure(arguments: argparse.Namespace) -> list[Result]:
    """All results, of a job on this machine."""
    settings = {"kinds": list(KINDS), "elements": arguments.elements, "skew": arguments.skew / 1e3,
                "iterations": arguments.iterations}
    found: list[Result] = launch.measured(launch.mpirun(arguments.ranks), "benchmarks.stragglers.latency_rank",
                                          settings, TIMEOUT)
    return found


def show(results: list[Result], arguments: argparse.Namespace) -> None:
    table = output.make_table(f"{arguments.ranks} ranks, {arguments.skew:g} ms apart", ["allreduce"],
                              ["elements", "mean latency, ms", "times shorter", "active ranks"])
    for r in results:
        whole = next(o["latency"] for o in results if (o["kind"], o["elements"]) == ("MPI_Allreduce", r["elements"]))
        table.add_row(r["kind"], f"{r['elements']:,}", f"{1e3 * r['latency']:.2f}", f"{whole / r['latency']:.1f}",
                      f"{r['active']:.2f}")
    output.make_console().print(table)


def plot(results: list[Result], arguments: argparse.Namespace) -> None:
    """Latency and active ranks, by length."""
    figure, (left, right) = output.load_pyplot().subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for place, (kind, color) in enumerate(KINDS.items()):
        mine = [r for r in results if r["kind"] == kind]
        where = [index + 0.27 * (place - 1) for index in range(len(mine))]
        bars = left.bar(where, [1e3 * r["latency"] for r in mine], 0.25, color=color, label=kind)
        left.bar_label(bars, fmt="%.1f", fontsize=8)
        bars = right.bar(where, [r["active"] for r in mine], 0.25, color=color)
        right.bar_label(bars, fmt="%.1f", fontsize=8)
    for axes, label in ((left, "mean latency (ms)"), (right, "active ranks")):
        axes.set(xlabel="float32 elements", ylabel=label)
        axes.set_xticks(range(len(arguments.elements)), [f"{n:,}" for n in arguments.elements])
    figure.suptitle(f"{arguments.ranks} ranks, each {arguments.skew:g} ms after the one before")
    output.legend_below(figure, left)
    output.save(figure, arguments.plot)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "latency")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--skew", type=float, default=20.0, help="milliseconds between two ranks")
    parser.add_argument("--iterations", type=int, default=64)
    parser.add_argument("--elements", type=int, nargs="+", default=[16, 16_384, 1_048_576])
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    results = measure(arguments)
    output.write_json(arguments.json, results)
    show(results, arguments)
    plot(results, arguments)


if __name__ == "__main__":
    main()
