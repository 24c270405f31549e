"""One allreduce of vectors from a thousand to many millions of elements on the cluster: where dense wins, and whether
strategy="auto" keeps up with it.

    sudo .venv/bin/python -m benchmarks.cluster.sizes

Gradients are synthetic. See cluster.py for what the cluster is and what it needs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.cluster.compare import DENSE, Job, Point, load_pyplot, run
from benchmarks.cluster.hosts import check_machine, cluster, in_words

SCHEMES = {"Horovod dense": "#555555", "OkTopk": "#dd8452", "OkTopk, auto": "#da8bc3"}
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000, 100_000_000)
BYTES_PER_ELEMENT = 18
"""Memory of a rank: gradient, residual, spare buffer, messages. Beyond 2^24 elements few numbers are drawn."""
ROUNDS = 3
"""Every scheme is measured so many times, in turns, as the machine's speed changes; the best counts."""


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each size and scheme the seconds of each round."""
    found = []
    with tqdm(total=len(arguments.sizes) * ROUNDS * len(SCHEMES), unit="job") as progress:
        steps = arguments.steps
        for n in arguments.sizes:
            rounds = ROUNDS if n < arguments.few_from else 1
            arguments.parameters, arguments.steps = n, min(steps, 10 * rounds)
            seconds: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
            for _ in range(rounds):
                for scheme in SCHEMES:
                    progress.set_postfix_str(f"n = {n:,}, {scheme}")
                    with cluster(arguments.hosts, arguments.rate) as hosts:
                        point = Point(arguments.hosts, arguments.rate, (arguments.density,))
                        seconds[scheme].append(run(hosts, point, Job((scheme,)), arguments)[0]["seconds"])
                    progress.update(ROUNDS // rounds)
            found += [{"n": n, "scheme": scheme, "seconds": values} for scheme, values in seconds.items()]
    return found


def show(results: list[dict[str, Any]], arguments: argparse.Namespace, console: Console) -> None:
    table = Table(title=f"Milliseconds of one allreduce on {arguments.hosts} hosts at {in_words(arguments.rate)}, "
                        f"density {arguments.density:.1%}: the best of the rounds' medians")
    for heading in ("n", *SCHEMES, "auto to dense"):
        table.add_column(heading, justify="right")
    for n in arguments.sizes:
        best = {r["scheme"]: min(r["seconds"]) for r in results if r["n"] == n}
        table.add_row(f"{n:,}", *(f"{1e3 * best[scheme]:.2f}" for scheme in SCHEMES),
                      f"{best['OkTopk, auto'] / best[DENSE[0]]:.2f}")
    console.print(table)


def plot(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(6.5, 4.5), layout="constrained")
    for scheme, color in SCHEMES.items():
        axes.plot(arguments.sizes, [min(r["seconds"]) for r in results if r["scheme"] == scheme], marker="o",
                  label=scheme, color=color, linestyle="--" if scheme in DENSE else "-")
    axes.set(xscale="log", yscale="log", xlabel="n, gradient elements", ylabel="seconds of one allreduce",
             title=f"{arguments.hosts} hosts at {in_words(arguments.rate)}, density {arguments.density:.1%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.plot, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--few-from", type=int, default=5_000_000, help="from this size on, one round of 10 steps")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, such as 100mbit")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--warm-up", type=int, default=20, help="steps of a sparse scheme before those timed; "
                                                               "strategy='auto' decides after 16")
    parser.add_argument("--steps", type=int, default=30, help="timed")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each job")
    parser.add_argument("--json", type=Path, default=Path("runs/sizes.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/sizes.png"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.gradients = None
    for n in arguments.sizes:
        check_machine(arguments.hosts, arguments.rate, n, BYTES_PER_ELEMENT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("sizes: terminated"))
    results = measure(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))
    console = Console()
    show(results, arguments, console if console.is_terminal else Console(width=130))
    plot(results, arguments)


if __name__ == "__main__":
    main()
