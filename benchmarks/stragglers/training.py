"""Eager-SGD (Li et al., PPoPP 2020): training with partial allreduces by ranks that are uneven (Figures 10, 12, 13).

    .venv/bin/python -m benchmarks.stragglers.training                        # 8 ranks on this machine
    sudo .venv/bin/python -m benchmarks.stragglers.training --tasks wide --cluster 1gbit \\
        --methods synchronous majority oktopk both

Ranks sleep for as long as their device would compute (see tasks.py); everything else is real.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks import launch, output
from benchmarks.cluster.hosts import check_machine, cluster, in_words
from benchmarks.output import BLUE, GREEN, ORANGE, RED, VIOLET
from benchmarks.stragglers.tasks import TASKS

METHODS = {"synchronous": "synchronous (Horovod)", "solo": "solo", "majority": "majority",
           "oktopk": "OkTopk", "both": "majority, OkTopk", "solo-oktopk": "solo, OkTopk"}
COLORS = {"synchronous": "#222222", "solo": ORANGE, "majority": BLUE, "oktopk": GREEN, "both": RED,
          "solo-oktopk": VIOLET}
Run = dict[str, Any]


def measure(arguments: argparse.Namespace) -> list[Run]:
    """All runs; those that --json holds, with the same arguments, are not repeated."""
    known: list[Run] = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    runs = []
    for this in tqdm(list(wanted(arguments)), unit="run"):
        run = next((run for run in known if this.items() <= run.items()), None)
        if run is None:
            run = {**this, **start(this, arguments)}
            known.append(run)
            output.write_json(arguments.json, known)
        runs.append(run)
    return runs


def wanted(arguments: argparse.Namespace) -> Iterator[Run]:
    for task in arguments.tasks:
        for scale in arguments.scales:
            for method in arguments.methods:
                for seed in arguments.seeds:
                    yield {"task": task, "scale": scale, "method": method, "seed": seed, "ranks": arguments.ranks,
                           "cluster": arguments.cluster, "density": arguments.density}


def start(run: Run, arguments: argparse.Namespace) -> Run:
    settings = {name: run[name] for name in ("task", "method", "seed", "scale", "density")}
    module = "benchmarks.stragglers.training_rank"
    if arguments.cluster is None:
        return dict(launch.measured(launch.mpirun(arguments.ranks), module, settings, arguments.timeout))
    with cluster(arguments.ranks, arguments.cluster) as hosts:
        return dict(launch.measured(hosts.mpirun(), module, settings, arguments.timeout))


def of(runs: list[Run], **properties: Any) -> list[Run]:
    return [run for run in runs if properties.items() <= run.items()]


def show(runs: list[Run], arguments: argparse.Namespace, console: Console) -> None:
    where = "this machine" if arguments.cluster is None else f"hosts at {in_words(arguments.cluster)}"
    for name in arguments.tasks:
        task = TASKS[name]
        table = output.make_table(
            f"{task.title}: {arguments.ranks} ranks on {where}, seeds {', '.join(map(str, arguments.seeds))}",
            ["method"], ["unevenness", "steps a second", "times synchronous", f"mean {task.metric}",
                         "lowest to highest", "active ranks", "rounds per step"])
        for scale in arguments.scales:
            whole = [run["throughput"] for run in of(runs, task=name, scale=scale, method="synchronous")]
            for method in arguments.methods:
                found = of(runs, task=name, scale=scale, method=method)
                values = [run["history"][-1]["value"] for run in found]
                rate = statistics.fmean(run["throughput"] for run in found)
                table.add_row(METHODS[method], f"x {scale:g}", f"{rate:.2f}",
                              f"{rate / statistics.fmean(whole):.2f}" if whole else "",
                              f"{statistics.fmean(values):.4f}",
                              f"{min(values):.4f} to {max(values):.4f}",
                              f"{statistics.fmean(run['active'] for run in found):.1f}",
                              f"{statistics.fmean(run['rounds'] / run['steps'] for run in found):.2f}")
        console.print(table)


def plot(runs: list[Run], arguments: argparse.Namespace) -> None:
    """The metric over the seconds, a panel for each task; the largest unevenness, where there are several."""
    figure, panels = output.load_pyplot().subplots(1, len(arguments.tasks), figsize=(4.8 * len(arguments.tasks), 3.8),
                                                   layout="constrained", squeeze=False)
    for axes, name in zip(panels[0], arguments.tasks, strict=True):
        for method in arguments.methods:
            found = of(runs, task=name, method=method, scale=max(arguments.scales))
            columns = list(zip(*(run["history"] for run in found), strict=True))
            output.band(axes, [statistics.fmean(each["seconds"] for each in column) for column in columns],
                        [[each["value"] for each in column] for column in columns], COLORS[method],
                        label=METHODS[method], marker="o", markersize=3)
        if "loss" in TASKS[name].metric:
            axes.set_yscale("log")
        axes.set(xlabel="seconds", ylabel=TASKS[name].metric)
        axes.set_title(TASKS[name].title, fontsize=10)
        axes.grid(alpha=0.25)
    output.legend_below(figure, panels[0][0])
    output.save(figure, arguments.plot)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "eager")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["hyperplane", "digits", "docstrings"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["synchronous", "solo", "majority"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0], help="of the differences between ranks")
    parser.add_argument("--density", type=float, default=0.01, help="of the sparse methods")
    parser.add_argument("--cluster", metavar="RATE", help="one rank on each of so many hosts with links at this rate")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    arguments = parser.parse_args(line)
    if arguments.cluster is not None:
        check_machine(arguments.ranks, arguments.cluster, 2_000_000)
    return arguments


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    runs = measure(arguments)
    show(runs, arguments, output.make_console())
    plot(runs, arguments)


if __name__ == "__main__":
    main()
