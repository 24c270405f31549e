"""Study of accuracy: models in PyTorch, trained by several methods and by dense allreduces.

    .venv/bin/python -m benchmarks.accuracy.convergence --studies lstm-4

Every method has the learning rate that is best for it, of the same ones. They are tried with the first seed, from
the middle one on, until both neighbours of the best are known to be worse; the other seeds take the best. Runs that
--json already holds are not repeated. There is a plot for each study.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import launch
from benchmarks.accuracy.studies import STUDIES, Options, Study
from benchmarks.output import band, legend_below, load_pyplot, make_console, make_parser, make_table, save, write_json
from horovod_oktopk.phases.volume import dense_volume
from horovod_oktopk.transport.base import WORD

Run = dict[str, Any]


@dataclass
class Runs:
    """Every run that there is, in a file. may_train: whether others are made."""

    path: Path
    timeout: float
    may_train: bool = True
    known: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.known = json.loads(self.path.read_text())["runs"]

    def of(self, study: Study, name: str, rate: float, seed: int) -> Run | None:
        """Return one run; make and write it if it is not known. None: it may not be made."""
        options = study.options_of(name, rate, seed)
        this = {"program": study.task.program, "ranks": study.ranks_of(name), "options": options}
        run = next((run for run in self.known if this.items() <= run.items()), None)
        if run is None and self.may_train:
            launcher = [] if study.threads else launch.horovodrun(study.ranks)
            run = {**train([*launcher, sys.executable, "-m", f"benchmarks.accuracy.{study.task.program}"], options,
                           self.timeout), **this}
            self.known.append(run)
            write_json(self.path, {"runs": self.known})
        return run


def train(command: list[str], options: Options, timeout: float) -> Run:
    """Run one training; return what the program writes."""
    line = [part for name, value in options.items()
            for part in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        launch.run([*command, *line, "--json", str(outcome)], timeout)
        found: Run = json.loads(outcome.read_text())
    return found


@dataclass(frozen=True)
class Tuned:
    """One method's runs at its best rate, by seed."""

    rate: float
    runs: list[Run]

    def values(self, metric: str) -> list[float]:
        return [run[metric] for run in self.runs]

    def mean(self, metric: str) -> float:
        return statistics.fmean(self.values(metric))


def measure(study: Study, seeds: list[int], runs: Runs, console: Console) -> dict[str, Tuned]:
    """Return the methods of a study that have runs, by name."""
    rates: dict[str, float] = {}
    for name, method in study.methods.items():
        rates[name] = rates[method.rate_of] if method.rate_of else best_rate(study, name, seeds[0], runs)
    found: dict[str, Tuned] = {name: Tuned(rate, []) for name, rate in rates.items()}
    for seed in seeds:
        for name, tuned in found.items():
            run = runs.of(study, name, tuned.rate, seed)
            if run is not None:
                tuned.runs.append(run)
                console.print(f"{study.task.title}, {study.ranks} ranks, seed {seed}, {study.methods[name].title}: "
                              f"{study.task.shown(run[study.task.metric])}", style="dim")
    return {name: tuned for name, tuned in found.items() if tuned.runs}


def best_rate(study: Study, name: str, seed: int, runs: Runs) -> float:
    """Return a rate with no better neighbour; between rates that do equally well, the one nearer to the middle."""
    sign = 1 if study.task.metric == "accuracy" else -1
    rates, place = study.rates, len(study.rates) // 2

    def reached(place: int) -> float:
        run = runs.of(study, name, rates[place], seed) if 0 <= place < len(rates) else None
        return sign * run[study.task.metric] if run else -math.inf

    for direction in (-1, 1):
        start = place
        while reached(place + direction) > reached(place):
            place += direction
        if place != start:
            break
    return rates[place]


def show(study: Study, found: dict[str, Tuned], console: Console) -> None:
    task = study.task
    first = found["dense"].runs[0]
    table = make_table(f"{task.title}, {study.title}: {first['parameters']:,} parameters, {study.ranks} ranks",
                       ["method"], ["seeds", "learning rate", f"mean {task.metric.replace('_', ' ')}",
                                    "lowest to highest", "to dense", "bytes per rank and step"])
    for name, tuned in found.items():
        values = tuned.values(task.metric)
        table.add_row(
            study.methods[name].title, str(len(values)), f"{tuned.rate:g}", task.shown(tuned.mean(task.metric)),
            f"{task.shown(min(values))} to {task.shown(max(values))}",
            "" if name == "dense" else to_dense(study, tuned, found["dense"]),
            f"{statistics.fmean(bytes_per_step(study, run) for run in tuned.runs):,.0f}")
    console.print(table)
    console.print("Of the last epoch. The learning rate is that of all ranks together. Bytes are means over all "
                  "steps, a warm-up's included: counted as sent, for dense computed, 2n(P-1)/P words.")


def bytes_per_step(study: Study, run: Run) -> float:
    """Return what a rank sends in a step; of dense that ran on fewer ranks, what it would send on the study's."""
    if run["options"]["compression"] == "none" and run["ranks"] != study.ranks:
        return WORD * dense_volume(run["parameters"], study.ranks)
    return float(run["bytes_per_step"])


def history_of(study: Study, run: Run, steps: float) -> list[dict[str, float]]:
    """Return a run's history, of dense with the bytes that `bytes_per_step` says. steps: of one epoch."""
    if run["options"]["compression"] != "none":
        return list(run["history"])
    return [{**entry, "bytes": entry["epoch"] * steps * bytes_per_step(study, run)} for entry in run["history"]]


def steps_of_an_epoch(found: dict[str, Tuned]) -> float:
    counted = next(run for tuned in found.values() for run in tuned.runs if run["bytes_per_step"])
    return float(counted["history"][-1]["bytes"] / counted["bytes_per_step"] / len(counted["history"]))


def to_dense(study: Study, tuned: Tuned, dense: Tuned) -> str:
    """Return the difference to dense, in words, over the seeds that both have."""
    of = [{run["options"]["seed"]: run[study.task.metric] for run in each.runs} for each in (tuned, dense)]
    seeds = of[0].keys() & of[1].keys()
    means = [statistics.fmean(values[seed] for seed in seeds) for values in of] if seeds else []
    return study.task.difference(*means) if means else ""


def plot(study: Study, found: dict[str, Tuned], path: Path) -> None:
    """Plot against epochs, and against the bytes that a rank has sent."""
    task = study.task
    figure, (by_epoch, by_bytes) = load_pyplot().subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    steps = steps_of_an_epoch(found)
    for name, tuned in found.items():
        histories = [history_of(study, run, steps) for run in tuned.runs]
        draw(by_epoch, study, name, histories, "epoch", 1)
        draw(by_bytes, study, name, histories, "bytes", 1e-6)
    by_epoch.set(xlabel="epoch", ylabel=task.label)
    by_bytes.set(xlabel="MB sent by a rank so far", xscale="log")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    late = [task.unit * entry[task.metric] for tuned in found.values() for run in tuned.runs
            for entry in run["history"][len(run["history"]) // 5:]]  # what is before would hide the rest
    margin = 0.05 * (max(late) - min(late))
    by_epoch.set_ylim(min(late) - margin, max(late) + margin)
    for axes in (by_epoch, by_bytes):
        axes.grid(alpha=0.25)
    legend_below(figure, by_epoch, columns=3 if len(found) > 4 else None)
    figure.suptitle(f"{task.title}, {study.title}, {study.ranks} ranks: means over the seeds, and from lowest to "
                    "highest")
    save(figure, path)


def draw(axes: Any, study: Study, name: str, histories: list[list[dict[str, float]]], x: str, unit: float) -> None:
    """Draw a line of means over the seeds, in a band from the lowest to the highest."""
    columns = list(zip(*histories, strict=True))
    values = [[study.task.unit * entry[study.task.metric] for entry in column] for column in columns]
    places = [unit * statistics.fmean(entry[x] for entry in column) for column in columns]
    method = study.methods[name]
    band(axes, places, values, method.color, label=method.title, linestyle=method.line,
         linewidth=2.2 if name in ("dense", "step-ahead") else 1.4)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "convergence")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES), help="all, if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--no-training", dest="may_train", action="store_false", help="show the runs of --json alone")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    runs, console = Runs(arguments.json, arguments.timeout, arguments.may_train), make_console()
    for name in arguments.studies:
        found = measure(STUDIES[name], arguments.seeds, runs, console)
        if "dense" not in found:
            console.print(f"{name}: {arguments.json} has no runs of dense at its best rate yet")
            continue
        show(STUDIES[name], found, console)
        plot(STUDIES[name], found, arguments.plot.with_stem(f"{arguments.plot.stem}_{name}"))


if __name__ == "__main__":
    main()
