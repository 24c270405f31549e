"""One allreduce, by every scheme and by dense allreduces, on a cluster of network namespaces with limited links.

    sudo .venv/bin/python -m benchmarks.cluster.compare --hosts 8 --rate 1gbit
    sudo .venv/bin/python -m benchmarks.cluster.compare --sweep --gradients runs/vgg16.npy

The first compares at one point; the second also varies hosts, density and rate, one at a time. It needs root and
iproute2. Bytes are counted by the library and by the hosts' interfaces, and both are shown.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.cluster.hosts import Cluster, check_machine, cluster, in_words, run_job

PROGRAM = "benchmarks.cluster.allreduce"
SPARSE = ("OkTopk", "OkTopk, bfloat16", "OkTopk, reuse", "OkTopk, auto", "GTopk", "TopkDSA", "TopkA", "GaussianK")
DENSE = ("Horovod dense", "MPI dense")
ALGORITHMS = {"ring": 4, "segmented ring": 5, "Rabenseifner": 6}
"""Open MPI's numbers of its allreduce algorithms (coll_tuned_allreduce_algorithm)."""
COLORS = {"OkTopk": "#dd8452", "OkTopk, bfloat16": "#c44e52", "OkTopk, reuse": "#ccb974", "OkTopk, auto": "#da8bc3",
          "GTopk": "#55a868", "TopkDSA": "#8172b3", "TopkA": "#4c72b0", "GaussianK": "#64b5cd",
          "Horovod dense": "#555555", "best dense": "#aaaaaa"}
Result = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """What is measured together."""

    hosts: int
    rate: str
    densities: tuple[float, ...]


@dataclass(frozen=True)
class Job:
    """Programs that one mpirun runs; algorithm: of MPI's allreduce, None for Open MPI's choice."""

    schemes: tuple[str, ...]
    algorithm: str | None = None

    def settings(self) -> list[str]:
        if self.algorithm is None:
            return []
        return ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm",
                str(ALGORITHMS[self.algorithm])]


def points(arguments: argparse.Namespace) -> list[Point]:
    """The base point, and in a sweep those that differ from it in hosts, rate or densities."""
    if not arguments.sweep:
        return [Point(arguments.hosts, arguments.rate, (arguments.density,))]
    density = (arguments.density,)
    return [Point(arguments.hosts, arguments.rate, tuple(sorted({0.001, 0.01, 0.02, arguments.density}))),
            *(Point(hosts, arguments.rate, density) for hosts in (2, 4, 8, 16) if hosts != arguments.hosts),
            *(Point(arguments.hosts, rate, density) for rate in ("100mbit", "1gbit", "10gbit")
              if rate != arguments.rate)]


def jobs(schemes: tuple[str, ...], algorithms: tuple[str, ...]) -> list[Job]:
    """Horovod gets jobs of its own, as its background thread takes time from the others."""
    apart = [Job((name,), algorithm) for name in DENSE if name in schemes for algorithm in (None, *algorithms)]
    together = tuple(name for name in SPARSE if name in schemes)
    return [*apart, Job(together)] if together else apart


def measure(arguments: argparse.Namespace) -> list[Result]:
    """One dictionary for each scheme, density and point."""
    algorithms = ("segmented ring",) if arguments.sweep else tuple(ALGORITHMS)
    planned = [(point, job) for point in points(arguments) for job in jobs(tuple(arguments.schemes), algorithms)]
    found: list[Result] = []
    for point, job in tqdm(planned, unit="job"):
        with cluster(point.hosts, point.rate) as hosts:
            for result in run(hosts, point, job, arguments):
                found.append({**result, "rate": point.rate,
                              "scheme": result["scheme"] + (f", {job.algorithm}" if job.algorithm else "")})
        write(found, arguments)
    return found


def run(hosts: Cluster, point: Point, job: Job, arguments: argparse.Namespace) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        recorded = ["--gradients", str(arguments.gradients.resolve())] if arguments.gradients else []
        run_job(hosts.mpirun(*job.settings(), sys.executable, "-m", PROGRAM, "--schemes", *job.schemes, "--densities",
                             *map(str, point.densities), "--parameters", str(arguments.parameters), "--warm-up",
                             str(arguments.warm_up), "--steps", str(arguments.steps), "--json", str(outcome),
                             *recorded), arguments.timeout)
        results: list[Result] = json.loads(outcome.read_text())
        return results


def write(results: list[Result], arguments: argparse.Namespace) -> None:
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"arguments": {name: str(value) for name, value in vars(arguments).items()},
                                          "results": results}, indent=1))


def at(results: list[Result], point: Point, density: float) -> list[Result]:
    """The results of one point and density; dense ones have no density."""
    return [r for r in results if (r["ranks"], r["rate"]) == (point.hosts, point.rate)
            and r["density"] in (None, density)]


def show(results: list[Result], point: Point, density: float, console: Console) -> None:
    found = at(results, point, density)
    dense = next((r["seconds"] for r in found if r["scheme"] == "Horovod dense"), None)
    table = Table(title=f"One allreduce of {found[0]['n']:,} gradients on {point.hosts} hosts at "
                        f"{in_words(point.rate)}, density {density:.1%}")
    table.add_column("scheme", no_wrap=True)
    for heading in ("seconds", "of them local", "faster than Horovod dense", "MB counted", "MB on the interface",
                    "selected / k"):
        table.add_column(heading, justify="right")
    for r in found:
        faster = dense / r["seconds"] if dense else None
        sent = r["bytes_sent"] / 1e6 if "bytes_sent" in r else None
        figures = [(r["seconds"], 3), (r.get("local_seconds"), 3), (faster, 1), (sent, 2),
                   (r["interface_bytes"] / 1e6, 2), (r.get("selected"), 2)]
        table.add_row(r["scheme"], *("-" if value is None else f"{value:.{digits}f}" for value, digits in figures))
    console.print(table)


def plot_point(results: list[Result], point: Point, density: float, path: Path) -> None:
    """Bars of the seconds and megabytes at one point."""
    pyplot = load_pyplot()
    found = at(results, point, density)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 0.5 + 0.36 * len(found)), layout="constrained", sharey=True)
    names = [r["scheme"] for r in found]
    for axes, key, unit, factor in ((panels[0], "seconds", "seconds", 1.0),
                                    (panels[1], "interface_bytes", "megabytes that a rank sends", 1e-6)):
        values = [r[key] * factor for r in found]
        axes.barh(names, values, color=["#dd8452" if name.startswith("OkTopk") else "#4c72b0" for name in names])
        for row, value in enumerate(values):
            axes.annotate(f"{value:.2g}" if value < 10 else f"{value:.0f}", (value, row), xytext=(4, 0),
                          textcoords="offset points", va="center")
        axes.set_xlabel(unit)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(f"One allreduce, n = {found[0]['n']:,}, density {density:.1%}, {point.hosts} hosts at "
                    f"{in_words(point.rate)}")
    figure.savefig(path, dpi=150)


def plot_sweep(results: list[Result], arguments: argparse.Namespace, path: Path) -> None:
    """Seconds against hosts, density and rate, and bytes against hosts."""
    pyplot = load_pyplot()
    base = points(arguments)[0]
    axes_of = {"hosts": [Point(p, base.rate, ()) for p in (2, 4, 8, 16)],
               "rate": [Point(base.hosts, rate, ()) for rate in ("100mbit", "1gbit", "10gbit")]}
    figure, grid = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    panels = grid.ravel()
    drawn = [name for name in COLORS if name == "best dense" or any(r["scheme"] == name for r in results)]
    for name in drawn:
        prefix = "" if name == "best dense" else name
        by_hosts = [_value(results, point, arguments.density, prefix, "seconds") for point in axes_of["hosts"]]
        by_rate = [_value(results, point, arguments.density, prefix, "seconds") for point in axes_of["rate"]]
        by_density = [_value(results, base, density, prefix, "seconds") for density in base.densities]
        sent = [_value(results, point, arguments.density, prefix, "interface_bytes") for point in axes_of["hosts"]]
        style = {"color": COLORS[name], "label": name, "marker": "o", "linestyle": "--" if "dense" in name else "-"}
        panels[0].plot([2, 4, 8, 16], by_hosts, **style)
        panels[1].plot([in_words(point.rate) for point in axes_of["rate"]], by_rate, **style)
        panels[2].plot([f"{density:.1%}" for density in base.densities], by_density, **style)
        panels[3].plot([2, 4, 8, 16], [value / 1e6 for value in sent], **style)
    labels = ("hosts", f"rate, {base.hosts} hosts", f"density, {base.hosts} hosts", "hosts")
    for index, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("megabytes that a rank sends" if index == 3 else "seconds of one allreduce")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (panels[0], panels[3]):
        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=-(-len(drawn) // 2),
                  frameon=False)
    figure.suptitle(f"One allreduce, n = {results[0]['n']:,}; where not varied: density {arguments.density:.0%}, "
                    f"{in_words(base.rate)}")
    figure.savefig(path, dpi=150)


def _value(results: list[Result], point: Point, density: float, prefix: str, key: str) -> float:
    """Of the scheme, or where the prefix is empty of the fastest dense one; NaN where it was not measured."""
    found = [r for r in at(results, point, density) if (r["scheme"] == prefix if prefix else "dense" in r["scheme"])]
    return float(min(found, key=lambda r: r["seconds"])[key]) if found else float("nan")


def load_pyplot() -> Any:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, such as 100mbit")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--sweep", action="store_true", help="also 2 to 16 hosts, 0.1 to 2 %%, 100mbit to 10gbit")
    parser.add_argument("--parameters", type=int, default=14_728_266, help="synthetic gradients (default: VGG-16)")
    parser.add_argument("--gradients", type=Path, help="recorded ones instead: python -m benchmarks.data.models")
    parser.add_argument("--warm-up", type=int, default=20, help="steps of a sparse scheme before those timed")
    parser.add_argument("--steps", type=int, default=8, help="timed")
    parser.add_argument("--schemes", nargs="+", choices=(*DENSE, *SPARSE), default=(*DENSE, *SPARSE),
                        help="all, if not given")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each job")
    parser.add_argument("--json", type=Path, default=Path("runs/cluster.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/cluster.png"))
    arguments = parser.parse_args()
    if not 0 < arguments.density <= 1:
        parser.error(f"--density must be in (0, 1]; got {arguments.density}")
    if arguments.gradients is not None:
        if not arguments.gradients.is_file():
            parser.error(f"--gradients: there is no file {arguments.gradients}; "
                         f"python -m benchmarks.data.models --path {arguments.gradients} records them")
        arguments.parameters = np.load(arguments.gradients, mmap_mode="r").shape[1]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    for point in points(arguments):
        check_machine(point.hosts, point.rate, arguments.parameters)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("cluster: terminated"))
    results = measure(arguments)
    console = Console()
    console = console if console.is_terminal else Console(width=130)
    for point in points(arguments):
        for density in point.densities:
            show(results, point, density, console)
    console.print("Medians of the steps; seconds of the slowest rank; local seconds and bytes of the mean rank. The "
                  "interface also counts headers and acknowledgements.")
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    if arguments.sweep:
        plot_sweep(results, arguments, arguments.plot)
    else:
        plot_point(results, points(arguments)[0], arguments.density, arguments.plot)


if __name__ == "__main__":
    main()
