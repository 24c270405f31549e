"""What a scheme does to accuracy: two tasks in PyTorch, trained by every scheme and by dense allreduces.

    .venv/bin/python -m benchmarks.accuracy.convergence

runs pytorch_digits.py on 4 ranks and pytorch_text.py on 2 under horovodrun (MPI), with several seeds
each. Runs that --json already holds, with the same arguments, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks import launch
from benchmarks.output import band, legend_below, load_pyplot, make_console, make_parser, make_table, save, write_json

SCHEMES = {"none": "dense", "oktopk": "OkTopk", "topka": "TopkA", "topkdsa": "TopkDSA", "gtopk": "GTopk",
           "gaussiank": "GaussianK"}
COLORS = {"none": "#222222", "oktopk": "#dd8452", "topka": "#4c72b0", "topkdsa": "#55a868", "gtopk": "#c44e52",
          "gaussiank": "#8172b3"}


@dataclass(frozen=True)
class Task:
    """One program. settings: for all schemes; sparse: for all but dense."""

    title: str
    program: str
    ranks: int
    metric: str
    label: str
    settings: tuple[str, ...]
    sparse: tuple[str, ...] = ()

    def arguments(self, scheme: str, seed: int, density: float) -> list[str]:
        """The program's."""
        own = () if scheme == "none" else (*self.sparse, "--density", str(density))
        return ["--compression", scheme, "--seed", str(seed), *self.settings, *own]

    def shown(self, value: float) -> str:
        """The metric, in the table's unit."""
        return f"{value:.2%}" if self.metric == "accuracy" else f"{value:.4f}"

    def difference(self, value: float, dense: float) -> str:
        """To dense: points of accuracy, or percent of the loss."""
        if self.metric == "accuracy":
            return f"{100 * (value - dense):+.2f} points"
        return f"{value / dense - 1:+.1%}"


TASKS = {
    "digits": Task("Handwritten digits, convolutional network", "pytorch_digits", 4, "accuracy",
                   "test accuracy (%)", ()),
    "text": Task("Characters, LSTM", "pytorch_text", 2, "validation_loss",
                 "validation loss (nats per character)", ("--epochs", "6", "--lr", "1.0"),
                 sparse=("--density-warmup", "3")),
}


def train(task: Task, arguments: list[str], timeout: float) -> dict[str, Any]:
    """One training run; what the program writes."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        launch.run([*launch.horovodrun(task.ranks), sys.executable, "-m", f"benchmarks.accuracy.{task.program}",
                    *arguments, "--json", str(outcome)], timeout)
        found: dict[str, Any] = json.loads(outcome.read_text())
    return found


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs; each is written to --json as soon as it has ended."""
    known = json.loads(arguments.json.read_text())["runs"] if arguments.json.exists() else []
    wanted = [(name, scheme, seed) for name in arguments.tasks for seed in arguments.seeds
              for scheme in arguments.schemes]
    runs: list[dict[str, Any]] = []
    with tqdm(total=len(wanted), unit="run") as progress:
        for name, scheme, seed in wanted:
            progress.set_postfix_str(f"{name}, {SCHEMES[scheme]}, seed {seed}")
            line = TASKS[name].arguments(scheme, seed, arguments.density)
            this = {"task": name, "scheme": scheme, "seed": seed, "arguments": line}
            run = next((run for run in known if this.items() <= run.items()), None)
            if run is None:
                run = {**this, **train(TASKS[name], line, arguments.timeout)}
                known.append(run)
                write_json(arguments.json, {"runs": known})
            runs.append(run)
            progress.update()
    return runs


def of(runs: list[dict[str, Any]], task: str, scheme: str) -> list[dict[str, Any]]:
    """The runs of one scheme, of all seeds."""
    return [run for run in runs if (run["task"], run["scheme"]) == (task, scheme)]


def show(runs: list[dict[str, Any]], arguments: argparse.Namespace, console: Console) -> None:
    for name in arguments.tasks:
        task = TASKS[name]
        first = next(run for run in runs if run["task"] == name)
        table = make_table(f"{task.title}: {first['parameters']:,} parameters, {task.ranks} ranks, density "
                           f"{arguments.density:.1%}, seeds {', '.join(map(str, arguments.seeds))}", ["scheme"],
                           [f"mean {task.metric.replace('_', ' ')}", "lowest to highest", "mean to dense's mean",
                            "bytes per rank and step", "seconds"])
        dense = [run[task.metric] for run in of(runs, name, "none")]
        for scheme in arguments.schemes:
            found = of(runs, name, scheme)
            values = [run[task.metric] for run in found]
            mean = statistics.fmean(values)
            table.add_row(
                SCHEMES[scheme], task.shown(mean), f"{task.shown(min(values))} to {task.shown(max(values))}",
                task.difference(mean, statistics.fmean(dense)) if dense and scheme != "none" else "",
                f"{statistics.fmean(run['bytes_per_step'] for run in found):,.0f}",
                f"{statistics.fmean(run['history'][-1]['seconds'] for run in found):.1f}")
        console.print(table)
    console.print("Of the last epoch. Bytes are means over all steps, the warm-up's included: counted as sent, for "
                  "dense computed, 2n(P-1)/P words. All ranks share one machine, with no network between them.")


def plot(runs: list[dict[str, Any]], arguments: argparse.Namespace, path: Path) -> None:
    figure, rows = load_pyplot().subplots(
        len(arguments.tasks), 2, figsize=(11, 4 * len(arguments.tasks)), squeeze=False, layout="constrained",
        sharey="row")
    for name, (by_epoch, by_second) in zip(arguments.tasks, rows, strict=True):
        task = TASKS[name]
        for scheme in arguments.schemes:
            histories = [run["history"] for run in of(runs, name, scheme)]
            draw(by_epoch, histories, "epoch", task.metric, scheme)
            draw(by_second, histories, "seconds", task.metric, scheme)
        by_epoch.set(xlabel="epoch", ylabel=task.label, title=f"{task.title}, {task.ranks} ranks")
        by_second.set(xlabel="seconds, with no network between the ranks")
        zoom(by_epoch, runs, name, task.metric)
        for axes in (by_epoch, by_second):
            axes.grid(alpha=0.25)
    legend_below(figure, rows[0][0])
    figure.suptitle(f"Density {arguments.density:.1%}; lines: means of {len(arguments.seeds)} seeds, "
                    "bands: lowest to highest")
    save(figure, path)


def draw(axes: Any, histories: list[list[dict[str, float]]], x: str, metric: str, scheme: str) -> None:
    """A line of means over the seeds, in a band from the lowest to the highest."""
    factor = 100 if metric == "accuracy" else 1
    columns = list(zip(*histories, strict=True))
    values = [[factor * entry[metric] for entry in column] for column in columns]
    places = [statistics.fmean(entry[x] for entry in column) for column in columns]
    front = 3 if scheme in ("none", "oktopk") else 2
    band(axes, places, values, COLORS[scheme], label=SCHEMES[scheme], linewidth=2.2 if front == 3 else 1.3,
         zorder=front, linestyle="--" if scheme == "topkdsa" else "-")  # it reduces to the same sums as TopkA


def zoom(axes: Any, runs: list[dict[str, Any]], name: str, metric: str) -> None:
    """Leaves the first fifth of the epochs out of the vertical range, where it would hide the rest."""
    factor = 100 if metric == "accuracy" else 1
    late = [factor * entry[metric] for run in runs if run["task"] == name
            for entry in run["history"][len(run["history"]) // 5:]]
    margin = 0.05 * (max(late) - min(late))
    axes.set_ylim(min(late) - margin, max(late) + margin)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "convergence")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="all, if not given")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="all, if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    runs = measure(arguments)
    show(runs, arguments, make_console())
    plot(runs, arguments, arguments.plot)


if __name__ == "__main__":
    main()
