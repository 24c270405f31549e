"""What a scheme does to accuracy: the PyTorch examples, trained by every scheme and by dense allreduces.

    .venv/bin/python -m benchmarks.accuracy.convergence

runs benchmarks.accuracy.pytorch_digits on 4 ranks and benchmarks.accuracy.pytorch_text on 2 under horovodrun (MPI),
with several seeds each. Runs that --json already holds, with the same arguments, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

PACKAGE = "benchmarks.accuracy"
SCHEMES = {"none": "dense", "oktopk": "OkTopk", "topka": "TopkA", "topkdsa": "TopkDSA", "gtopk": "GTopk",
           "gaussiank": "GaussianK"}
COLORS = {"none": "#222222", "oktopk": "#dd8452", "topka": "#4c72b0", "topkdsa": "#55a868", "gtopk": "#c44e52",
          "gaussiank": "#8172b3"}


@dataclass(frozen=True)
class Task:
    """One example. settings: for all schemes; dense, sparse: those of either alone."""

    title: str
    script: str
    ranks: int
    metric: str
    label: str
    settings: tuple[str, ...]
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()

    def arguments(self, scheme: str, seed: int, density: float) -> list[str]:
        """The script's."""
        own = self.dense if scheme == "none" else (*self.sparse, "--density", str(density))
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


def environment() -> dict[str, str]:
    """This environment, with the launcher's programs on PATH, and Open MPI set for more ranks than cores."""
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                 "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def train(task: Task, arguments: list[str], timeout: float) -> dict[str, Any]:
    """One training run; what the script writes."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        command = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(task.ranks), "-H",
                   f"localhost:{task.ranks}", "--mpi", sys.executable, "-m", f"{PACKAGE}.{task.script}", *arguments,
                   "--json", str(outcome)]
        # A session of its own, so that whatever ends this program ends the ranks.
        with subprocess.Popen(command, env=environment(), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, start_new_session=True) as job:
            try:
                output, _ = job.communicate(timeout=timeout)
            except BaseException as error:
                os.killpg(job.pid, signal.SIGTERM)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise SystemExit(f"convergence: not ended after {timeout:g} s: {' '.join(command)}") from None
        if job.returncode or not outcome.exists():
            raise SystemExit(f"convergence: a run failed ({job.returncode}): {' '.join(command)}\n{output[-4000:]}")
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
            script_arguments = TASKS[name].arguments(scheme, seed, arguments.density)
            this = {"task": name, "scheme": scheme, "seed": seed, "arguments": script_arguments}
            run = next((run for run in known if this.items() <= run.items()), None)
            if run is None:
                run = {**this, **train(TASKS[name], script_arguments, arguments.timeout)}
                known.append(run)
                write(arguments.json, known)
            runs.append(run)
            progress.update()
    return runs


def write(path: Path, runs: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": runs}, indent=1))


def of(runs: list[dict[str, Any]], task: str, scheme: str) -> list[dict[str, Any]]:
    """The runs of one scheme, of all seeds."""
    return [run for run in runs if (run["task"], run["scheme"]) == (task, scheme)]


def show(runs: list[dict[str, Any]], arguments: argparse.Namespace, console: Console) -> None:
    for name in arguments.tasks:
        task = TASKS[name]
        first = next(run for run in runs if run["task"] == name)
        table = Table(title=f"{task.title}: {first['parameters']:,} parameters, {task.ranks} ranks, density "
                            f"{arguments.density:.1%}, seeds {', '.join(map(str, arguments.seeds))}")
        table.add_column("scheme", no_wrap=True)
        for heading in (f"mean {task.metric.replace('_', ' ')}", "lowest to highest", "mean to dense's mean",
                        "bytes per rank and step", "seconds"):
            table.add_column(heading, justify="right")
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
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, rows = pyplot.subplots(len(arguments.tasks), 2, figsize=(11, 4 * len(arguments.tasks)), squeeze=False,
                                   layout="constrained", sharey="row")
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
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"Density {arguments.density:.1%}; lines: means of {len(arguments.seeds)} seeds, "
                    "bands: lowest to highest")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw(axes: Any, histories: list[list[dict[str, float]]], x: str, metric: str, scheme: str) -> None:
    """A line of means over the seeds, in a band from the lowest to the highest."""
    factor = 100 if metric == "accuracy" else 1
    columns = list(zip(*histories, strict=True))
    values = [[factor * entry[metric] for entry in column] for column in columns]
    places = [statistics.fmean(entry[x] for entry in column) for column in columns]
    front = 3 if scheme in ("none", "oktopk") else 2
    axes.plot(places, [statistics.fmean(v) for v in values], color=COLORS[scheme], label=SCHEMES[scheme],
              linewidth=2.2 if front == 3 else 1.3, zorder=front,
              linestyle="--" if scheme == "topkdsa" else "-")  # it reduces to the same sums as TopkA
    axes.fill_between(places, [min(v) for v in values], [max(v) for v in values], color=COLORS[scheme], alpha=0.12,
                      linewidth=0)


def zoom(axes: Any, runs: list[dict[str, Any]], name: str, metric: str) -> None:
    """Leaves the first fifth of the epochs out of the vertical range, where it would hide the rest."""
    factor = 100 if metric == "accuracy" else 1
    late = [factor * entry[metric] for run in runs if run["task"] == name
            for entry in run["history"][len(run["history"]) // 5:]]
    margin = 0.05 * (max(late) - min(late))
    axes.set_ylim(min(late) - margin, max(late) + margin)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="all, if not given")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="all, if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run")
    parser.add_argument("--json", type=Path, default=Path("runs/convergence.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/convergence.png"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # Otherwise SIGTERM would leave the ranks behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("convergence: terminated"))
    runs = measure(arguments)
    console = Console()
    show(runs, arguments, console if console.is_terminal else Console(width=120))
    plot(runs, arguments, arguments.plot)


if __name__ == "__main__":
    main()
