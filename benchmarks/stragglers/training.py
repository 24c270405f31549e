"""Eager-SGD (Li et al., PPoPP 2020): training with partial allreduces by ranks that are uneven (Figures 10, 12, 13).

    .venv/bin/python -m benchmarks.stragglers.training                        # 8 ranks on this machine
    sudo .venv/bin/python -m benchmarks.stragglers.training --tasks wide --cluster 1gbit \\
        --methods synchronous majority oktopk both

Ranks sleep for as long as their device would compute (see uneven.py); everything else is real.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.cluster.hosts import check_machine, cluster, in_words, run_job

METHODS = {"synchronous": "synchronous (Horovod)", "solo": "solo", "majority": "majority",
           "oktopk": "OkTopk", "both": "majority, OkTopk", "solo-oktopk": "solo, OkTopk"}
COLORS = {"synchronous": "#222222", "solo": "#dd8452", "majority": "#4c72b0", "oktopk": "#55a868", "both": "#c44e52",
          "solo-oktopk": "#8172b3"}
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
Run = dict[str, Any]


def compression_of(method: str, density: float) -> Any:
    import horovod_oktopk.torch as plugin
    partial, dense, sparse = plugin.Partial, plugin.Dense(), plugin.OkTopk(density=density)
    return {"synchronous": dense, "oktopk": sparse, "solo": partial(dense, policy="solo"),
            "majority": partial(dense, policy="majority"), "both": partial(sparse, policy="majority"),
            "solo-oktopk": partial(sparse, policy="solo")}[method]


def train(name: str, method: str, seed: int, scale: float, density: float) -> Run:
    """On one rank: a whole training run."""
    import horovod.torch as hvd
    import torch

    from benchmarks.stragglers.tasks import TASKS
    from horovod_oktopk.torch import step_report, synchronize_replicas

    hvd.init()
    torch.set_num_threads(1)
    task = TASKS[name](hvd.rank(), hvd.size(), seed, scale)
    torch.manual_seed(seed)
    model = task.model()
    compression = compression_of(method, density)
    optimizer = hvd.DistributedOptimizer(task.optimizer(model), named_parameters=model.named_parameters(),
                                         compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    history: list[dict[str, float]] = []
    reports: list[Any] = []
    seconds, steps, compute = 0.0, 0, 0.0
    for epoch in range(task.epochs):
        if epoch % task.evaluated == 0:
            hvd.barrier()
            start = time.perf_counter()
        for batch, device in task.steps(epoch):
            time.sleep(max(0.0, device - compute))  # before the first gradient is ready
            begin = time.perf_counter()
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            compute = min(device, time.perf_counter() - begin)
            optimizer.step()
            steps += 1
            reports += [step_report(optimizer)] if method not in ("synchronous", "oktopk") else []
        if (epoch + 1) % task.evaluated == 0:
            synchronize_replicas(optimizer)
            seconds += time.perf_counter() - start
            value = task.evaluate(model) if hvd.rank() == 0 else 0.0
            history.append({"epoch": epoch + 1, "seconds": seconds, "value": value})
    active = [sum(report.active) for report in reports if report.rounds]
    return {"history": history, "steps": steps, "throughput": steps / seconds,
            "active": statistics.fmean(active) if active else hvd.size(),
            "rounds": sum(report.rounds for report in reports) if reports else steps,
            "seconds_saved": sum(report.seconds_saved for report in reports)}


def run_rank(arguments: argparse.Namespace) -> None:
    found = train(arguments.tasks[0], arguments.methods[0], arguments.seeds[0], arguments.scales[0],
                  arguments.density)
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
        arguments.json.write_text(json.dumps(found))


def launched(arguments: argparse.Namespace) -> Callable[[list[str]], list[str]]:
    """What starts a program on this machine's ranks."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return lambda program: [MPIRUN, *root, "--oversubscribe", "-np", str(arguments.ranks), "--mca",
                            "mpi_yield_when_idle", "1", *program]


def measure(arguments: argparse.Namespace) -> list[Run]:
    """All runs; those that --json holds, with the same arguments, are not repeated."""
    known: list[Run] = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    runs = []
    for this in tqdm(list(wanted(arguments)), unit="run"):
        run = next((run for run in known if this.items() <= run.items()), None)
        if run is None:
            run = {**this, **start(this, arguments)}
            known.append(run)
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(known, indent=1))
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
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        program = [sys.executable, "-m", __spec__.name, "--rank", "--tasks", run["task"],
                   "--methods", run["method"], "--seeds",
                   str(run["seed"]), "--scales", str(run["scale"]), "--density", str(run["density"]), "--json",
                   str(outcome)]
        if arguments.cluster is None:
            run_job(launched(arguments)(program), arguments.timeout)
        else:
            with cluster(arguments.ranks, arguments.cluster) as hosts:
                run_job(hosts.mpirun(*program), arguments.timeout)
        found: Run = json.loads(outcome.read_text())
    return found


def of(runs: list[Run], **properties: Any) -> list[Run]:
    return [run for run in runs if properties.items() <= run.items()]


def show(runs: list[Run], arguments: argparse.Namespace, console: Console) -> None:
    from benchmarks.stragglers.tasks import TASKS
    where = "this machine" if arguments.cluster is None else f"hosts at {in_words(arguments.cluster)}"
    for name in arguments.tasks:
        task = TASKS[name]
        table = Table(title=f"{task.title}: {arguments.ranks} ranks on {where}, seeds "
                            f"{', '.join(map(str, arguments.seeds))}")
        table.add_column("", no_wrap=True)
        for heading in ("unevenness", "steps a second", "times synchronous", f"mean {task.metric}",
                        "lowest to highest", "active ranks", "rounds per step"):
            table.add_column(heading, justify="right")
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


def plot(runs: list[Run], arguments: argparse.Namespace, path: Path) -> None:
    """The metric over the seconds, a panel for each task; the largest unevenness, where there are several."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from benchmarks.stragglers.tasks import TASKS
    figure, panels = pyplot.subplots(1, len(arguments.tasks), figsize=(4.8 * len(arguments.tasks), 3.8),
                                     layout="constrained", squeeze=False)
    for axes, name in zip(panels[0], arguments.tasks, strict=True):
        for method in arguments.methods:
            found = of(runs, task=name, method=method, scale=max(arguments.scales))
            columns = list(zip(*(run["history"] for run in found), strict=True))
            values = [[each["value"] for each in column] for column in columns]
            places = [statistics.fmean(each["seconds"] for each in column) for column in columns]
            axes.plot(places, [statistics.fmean(v) for v in values], color=COLORS[method], label=METHODS[method],
                      marker="o", markersize=3)
            axes.fill_between(places, [min(v) for v in values], [max(v) for v in values], color=COLORS[method],
                              alpha=0.12, linewidth=0)
        if "loss" in TASKS[name].metric:
            axes.set_yscale("log")
        axes.set(xlabel="seconds", ylabel=TASKS[name].metric, title=TASKS[name].title)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    tasks, methods = ("hyperplane", "digits", "docstrings"), ("synchronous", "solo", "majority")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tasks", nargs="+", choices=[*tasks, "wide"], default=list(tasks))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(methods))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0], help="of the differences between ranks")
    parser.add_argument("--density", type=float, default=0.01, help="of the sparse methods")
    parser.add_argument("--cluster", metavar="RATE", help="one rank on each of so many hosts with links at this rate")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--json", type=Path, default=Path("runs/eager.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/eager.png"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank:
        run_rank(arguments)
        return
    if arguments.cluster is not None:
        check_machine(arguments.ranks, arguments.cluster, 2_000_000)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("eager: terminated"))
    runs = measure(arguments)
    console = Console()
    show(runs, arguments, console if console.is_terminal else Console(width=130))
    plot(runs, arguments, arguments.plot)


if __name__ == "__main__":
    main()
