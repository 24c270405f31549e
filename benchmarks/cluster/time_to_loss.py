"""Loss against seconds: the losses of whole trainings by step, at the seconds that a step takes on a cluster.

    sudo .venv/bin/python -m benchmarks.cluster.time_to_loss --dilation 2

A network changes when an exchange ends, and nothing in what it computes. So the losses are those of
benchmarks.accuracy.convergence, on ranks that are threads, and the seconds are those of the same model's steps on
network namespaces. Seconds that --json already holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks import launch, output
from benchmarks.accuracy.convergence import Run, Runs, Tuned, steps_of_an_epoch
from benchmarks.accuracy.studies import BLACK, STUDIES
from benchmarks.cluster import training
from benchmarks.cluster.hosts import in_words
from benchmarks.output import BLUE, GREEN, GREY, ORANGE

MODELS = {"own-gpt": "gpt", "own-gpt-wide": "gpt-wide"}
"""Studies, and their models' names in cluster.training."""
RATES = ("100mbit", "1gbit", "10gbit")
Curve = list[tuple[float, float]]
"""Epochs and losses of one training."""


@dataclass(frozen=True)
class Method:
    """A way to train. schemes: of cluster.training, of which the fastest counts. training: its name in studies."""

    color: str
    schemes: Sequence[str]
    training: str

    def trainings_in(self, names: Container[str]) -> list[str]:
        """Return its trainings of all lengths, of those that there are, the longest last."""
        return [name for name in (self.training, f"{self.training}-longer") if name in names]


Methods = Mapping[str, Method]
METHODS: Methods = {
    "dense": Method(BLACK, ("Dense", "Dense, ring"), "dense"),
    "dense, float16": Method(GREY, ("float16", "float16, ring"), "dense"),
    "StepAhead(OkTopk), 1 %": Method(BLUE, ("StepAhead(OkTopk)",), "step-ahead"),
    "StepAhead(SameBlocks), 20 %": Method(GREEN, ("StepAhead(SameBlocks)",), "same-blocks"),
    "the same, without overlap": Method(ORANGE, ("StepAhead(SameBlocks), at once",), "at-once")}
"""By name. float16 has dense's losses: docs/comparison.md has no difference between them."""
GOALS = {"1 % above dense's loss": 1.01, "dense's loss": 1.0}
"""Multiples of the loss that dense training ends at, in the shorter schedule, with the same seed."""


def measure(methods: Methods, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by rate and scheme; measure what the JSON file lacks."""
    found: dict[str, dict[str, float]] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    study = STUDIES[arguments.study]
    wanted = [name for method in methods.values() for name in method.schemes if name in training.SCHEMES]
    for rate in RATES:
        if rate not in found:
            line = ["--models", MODELS[arguments.study], "--schemes", *wanted, "--rate", rate,
                    "--hosts", str(study.ranks), "--dilation", str(arguments.dilation),
                    "--steps", str(arguments.steps)]
            rows = training.measure(training.parse_arguments(line))
            found[rate] = {row["scheme"]: row["step"] for row in rows}
            output.write_json(arguments.json, found)
    return found


def seconds_of(method: Method, steps: dict[str, float]) -> float:
    return min(steps[name] for name in method.schemes)


def runs_of(name: str, runs: Runs, arguments: argparse.Namespace) -> list[Run]:
    """Return the run of each seed. Raise SystemExit if a seed has none."""
    study = STUDIES[arguments.study]
    found = []
    for seed in arguments.seeds:
        run = runs.of(study, name, study.rates[0], seed)
        if run is None:
            raise SystemExit(f"time_to_loss: {runs.path} has no training {name!r} of {arguments.study} with seed "
                             f"{seed}: run benchmarks.accuracy.convergence --studies {arguments.study} --json "
                             f"{runs.path}")
        found.append(run)
    return found


def curve_of(run: Run, metric: str) -> Curve:
    return [(entry["epoch"], entry[metric]) for entry in run["history"]]


def epochs_to(goal: float, curve: Curve) -> float | None:
    """Return the epochs until a loss, between two evaluations by a straight line; None if it is not reached."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= goal:
            return before + (after - before) * (high - goal) / (high - low) if high > goal else before
    return None


def reached(method: Method, share: float, curves: dict[str, list[Curve]]) -> list[float] | None:
    """Return the epochs of each seed until its goal, of the training that is the soonest; None if none gets there."""
    goals = [share * curve[-1][1] for curve in curves["dense"]]
    found = []
    for name in method.trainings_in(curves):
        epochs = [epochs_to(goal, curve) for goal, curve in zip(goals, curves[name], strict=True)]
        sure = [each for each in epochs if each is not None]
        if len(sure) == len(goals):
            found.append(sure)
    return min(found, key=statistics.fmean) if found else None


def show(methods: Methods, steps: dict[str, dict[str, float]], curves: dict[str, list[Curve]],
         steps_of_epoch: float) -> None:
    for rate in RATES:
        table = output.make_table(f"Minutes of training at {in_words(rate)}: mean of the seeds (range)", ["method"],
                                  ["seconds of a step", *GOALS])
        for name, method in methods.items():
            step = seconds_of(method, steps[rate])
            minutes = step * steps_of_epoch / 60
            cells = []
            for share in GOALS.values():
                epochs = reached(method, share, curves)
                cells.append("not reached" if epochs is None else f"{minutes * statistics.fmean(epochs):.1f} "
                             f"({minutes * min(epochs):.1f} to {minutes * max(epochs):.1f})")
            table.add_row(name, f"{step:.3f}", *cells)
        output.make_console().print(table)


def plot(methods: Methods, steps: dict[str, dict[str, float]], curves: dict[str, list[Curve]],
         steps_of_epoch: float, label: str, path: Path) -> None:
    """Plot the loss against minutes of the longest schedule, a panel for each rate, with a line at dense's goal."""
    pyplot = output.load_pyplot()
    figure, panels = pyplot.subplots(1, len(RATES), figsize=(11, 3.8), layout="constrained", sharey=True)
    final = statistics.fmean(curve[-1][1] for curve in curves["dense"])
    for axes, rate in zip(panels, RATES, strict=True):
        axes.axhline(final, color=BLACK, linewidth=0.8, linestyle=":",
                     label=f"dense after {len(curves['dense'][0])} epochs")
        for name, method in methods.items():
            minutes = seconds_of(method, steps[rate]) * steps_of_epoch / 60
            columns = list(zip(*curves[method.trainings_in(curves)[-1]], strict=True))
            output.band(axes, [minutes * column[0][0] for column in columns],
                        [[loss for _, loss in column] for column in columns], method.color, label=name, marker="o",
                        markersize=3)
        axes.set(title=in_words(rate), xlabel="minutes of training", xlim=0)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel(label)
    output.legend_below(figure, panels[0])
    output.save(figure, path)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "time_to_loss")
    parser.add_argument("--study", choices=MODELS, default="own-gpt")
    parser.add_argument("--dilation", type=int, default=1, help="time dilation, as in benchmarks.cluster.training")
    parser.add_argument("--steps", type=int, default=40, help="of each scheme, timed")
    parser.add_argument("--losses", type=Path, default=Path("docs/data/own_settings.json"),
                        help="what benchmarks.accuracy.convergence has written")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    study, runs = STUDIES[arguments.study], Runs(arguments.losses, timeout=0, may_train=False)
    methods = {name: method for name, method in METHODS.items() if method.trainings_in(study.methods)}
    trained = {name: runs_of(name, runs, arguments)
               for method in methods.values() for name in method.trainings_in(study.methods)}
    curves = {name: [curve_of(run, study.task.metric) for run in found] for name, found in trained.items()}
    steps_of_epoch = steps_of_an_epoch({name: Tuned(study.rates[0], found) for name, found in trained.items()})
    steps = measure(methods, arguments)
    show(methods, steps, curves, steps_of_epoch)
    plot(methods, steps, curves, steps_of_epoch, study.task.label, arguments.plot)


if __name__ == "__main__":
    main()
