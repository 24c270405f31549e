"""One allreduce, by every scheme and by dense allreduces, on a cluster of network namespaces with limited links.

    sudo .venv/bin/python -m benchmarks.cluster.compare --hosts 8 --rate 1gbit
    sudo .venv/bin/python -m benchmarks.cluster.compare --sweep --gradients runs/vgg16.npy

The first compares at one point; the second also varies hosts, density and rate, one at a time. It needs root and
iproute2. Bytes are counted by the library and by the hosts' interfaces, and both are shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks import launch, output
from benchmarks.cluster.compare_plots import HOSTS, RATES, Point, at, plot_point, plot_sweep
from benchmarks.cluster.hosts import add_arguments, check_machine, cluster, dilated, in_words
from benchmarks.cluster.jobs import ALGORITHMS, DENSE, SPARSE, Result, plan_jobs
from benchmarks.output import make_table


def points(arguments: argparse.Namespace) -> list[Point]:
    """Return the base point, and in a sweep those that differ from it in hosts, rate or densities."""
    if not arguments.sweep:
        return [Point(arguments.hosts, arguments.rate, (arguments.density,))]
    density = (arguments.density,)
    return [Point(arguments.hosts, arguments.rate, tuple(sorted({0.001, 0.01, 0.02, arguments.density}))),
            *(Point(hosts, arguments.rate, density) for hosts in HOSTS if hosts != arguments.hosts),
            *(Point(arguments.hosts, rate, density) for rate in RATES if rate != arguments.rate)]


def measure(arguments: argparse.Namespace) -> list[Result]:
    """Return one dictionary for each scheme, density and point."""
    algorithms = ("segmented ring",) if arguments.sweep else tuple(ALGORITHMS)
    recorded = None if arguments.gradients is None else str(arguments.gradients.resolve())
    planned = [(point, job) for point in points(arguments) for job in plan_jobs(tuple(arguments.schemes), algorithms)]
    found: list[Result] = []
    for point, job in tqdm(planned, unit="job"):
        settings = {"densities": point.densities, "parameters": arguments.parameters, "warm_up": arguments.warm_up,
                    "steps": arguments.steps, "gradients": recorded}
        with cluster(point.hosts, dilated(point.rate, arguments.dilation), arguments.ranks_per_host) as hosts:
            found += [{**result, "hosts": point.hosts, "rate": point.rate,
                       **in_dilated_seconds(result, arguments.dilation)}
                      for result in job.run(hosts, settings, arguments.timeout)]
        output.write_json(arguments.json, {"arguments": output.as_text(arguments), "results": found})
    return found


def in_dilated_seconds(result: Result, dilation: int) -> Result:
    """Return a result with the seconds of the machine that this one stands for."""
    return {name: result[name] / dilation for name in ("seconds", "local_seconds") if name in result}


def show(results: list[Result], point: Point, density: float, console: Console) -> None:
    found = at(results, point, density)
    dense = next((r["seconds"] for r in found if r["scheme"] == "Horovod dense"), None)
    table = make_table(f"One allreduce of {found[0]['n']:,} gradients, {found[0]['ranks']} ranks on {point.hosts} "
                       f"hosts at {in_words(point.rate)}, density {density:.1%}", ["scheme"],
                       ["seconds", "local", "faster than Horovod dense", "MB counted", "MB on the interface",
                        "selected / k"])
    for r in found:
        faster = dense / r["seconds"] if dense else None
        sent = r["bytes_sent"] / 1e6 if "bytes_sent" in r else None
        figures = [(r["seconds"], 3), (r.get("local_seconds"), 3), (faster, 1), (sent, 2),
                   (r["interface_bytes"] / 1e6, 2), (r.get("selected"), 2)]
        table.add_row(r["scheme"], *("-" if value is None else f"{value:.{digits}f}" for value, digits in figures))
    console.print(table)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "cluster")
    add_arguments(parser)
    parser.add_argument("--sweep", action="store_true", help="also 2 to 16 hosts, 0.1 to 2 %%, 100mbit to 10gbit")
    parser.add_argument("--parameters", type=int, default=14_728_266, help="synthetic gradients (default: VGG-16)")
    parser.add_argument("--gradients", type=Path, help="recorded ones instead: python -m benchmarks.data.record")
    parser.add_argument("--warm-up", type=int, default=20, help="steps of a sparse scheme before those timed")
    parser.add_argument("--steps", type=int, default=8, help="timed")
    parser.add_argument("--schemes", nargs="+", choices=(*DENSE, *SPARSE), default=(*DENSE, *SPARSE),
                        help="all, if not given")
    arguments = parser.parse_args(line)
    if not 0 < arguments.density <= 1:
        parser.error(f"--density must be in (0, 1]; got {arguments.density}")
    if arguments.gradients is not None:
        if not arguments.gradients.is_file():
            parser.error(f"--gradients: there is no file {arguments.gradients}; "
                         f"python -m benchmarks.data.record --path {arguments.gradients} records them")
        arguments.parameters = np.load(arguments.gradients, mmap_mode="r").shape[1]
    for point in points(arguments):
        check_machine(point.hosts, point.rate, arguments.parameters, ranks_per_host=arguments.ranks_per_host)
    return arguments


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    results = measure(arguments)
    console = output.make_console()
    for point in points(arguments):
        for density in point.densities:
            show(results, point, density, console)
    console.print("Medians of the steps; seconds of the slowest rank; local seconds and bytes of the mean rank. The "
                  "interface is that of a host, and also counts headers and acknowledgements.")
    if arguments.sweep:
        plot_sweep(results, points(arguments)[0], arguments.density, arguments.plot)
    else:
        plot_point(results, points(arguments)[0], arguments.density, arguments.plot)


if __name__ == "__main__":
    main()
