"""One allreduce of vectors from a thousand to many millions of elements on the cluster: where dense wins.

    sudo .venv/bin/python -m benchmarks.cluster.sizes

Gradients are synthetic. See hosts.py for what the cluster is and what it needs.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks import launch, output
from benchmarks.cluster.hosts import add_arguments, check_machine, cluster, in_words
from benchmarks.cluster.jobs import COLORS, DENSE, Job

SCHEMES = ("Horovod dense", "OkTopk")
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000, 100_000_000)
BYTES_PER_ELEMENT = 18
"""Memory of a rank: gradient, residual, spare buffer, messages. Beyond 2^24 elements few numbers are drawn."""
ROUNDS = 3
"""Every scheme is measured so many times, in turns, as the machine's speed changes; the best counts."""


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of each round, of each size and scheme."""
    found = []
    with tqdm(total=len(arguments.sizes) * ROUNDS * len(SCHEMES), unit="job") as progress:
        for n in arguments.sizes:
            rounds = ROUNDS if n < arguments.few_from else 1
            steps = min(arguments.steps, 10 * rounds)
            seconds: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
            for _ in range(rounds):
                for scheme in SCHEMES:
                    progress.set_postfix_str(f"n = {n:,}, {scheme}")
                    seconds[scheme].append(seconds_of(scheme, n, steps, arguments))
                    progress.update(ROUNDS // rounds)
            found += [{"n": n, "scheme": scheme, "seconds": values} for scheme, values in seconds.items()]
    return found


def seconds_of(scheme: str, n: int, steps: int, arguments: argparse.Namespace) -> float:
    settings = {"densities": [arguments.density], "parameters": n, "warm_up": arguments.warm_up, "steps": steps,
                "gradients": None}
    with cluster(arguments.hosts, arguments.rate, arguments.ranks_per_host) as hosts:
        return float(Job((scheme,)).run(hosts, settings, arguments.timeout)[0]["seconds"])


def show(results: list[dict[str, Any]], arguments: argparse.Namespace, console: Console) -> None:
    table = output.make_table(
        f"Milliseconds of one allreduce on {arguments.hosts} hosts at {in_words(arguments.rate)}, density "
        f"{arguments.density:.1%}: the best of the rounds' medians", [], ["n", *SCHEMES])
    for n in arguments.sizes:
        best = {r["scheme"]: min(r["seconds"]) for r in results if r["n"] == n}
        table.add_row(f"{n:,}", *(f"{1e3 * best[scheme]:.2f}" for scheme in SCHEMES))
    console.print(table)


def plot(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    figure, axes = output.load_pyplot().subplots(figsize=(6.5, 4.5), layout="constrained")
    for scheme in SCHEMES:
        axes.plot(arguments.sizes, [min(r["seconds"]) for r in results if r["scheme"] == scheme], marker="o",
                  label=scheme, color=COLORS[scheme], linestyle="--" if scheme in DENSE else "-")
    axes.set(xscale="log", yscale="log", xlabel="n, gradient elements", ylabel="seconds of one allreduce",
             title=f"{arguments.hosts} hosts at {in_words(arguments.rate)}, density {arguments.density:.1%}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    output.save(figure, arguments.plot)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "sizes")
    add_arguments(parser)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--few-from", type=int, default=5_000_000, help="from this size on, one round of 10 steps")
    parser.add_argument("--warm-up", type=int, default=20, help="steps of a sparse scheme before those timed")
    parser.add_argument("--steps", type=int, default=30, help="timed")
    arguments = parser.parse_args(line)
    for n in arguments.sizes:
        check_machine(arguments.hosts, arguments.rate, n, BYTES_PER_ELEMENT, arguments.ranks_per_host)
    return arguments


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    results = measure(arguments)
    output.write_json(arguments.json, results)
    show(results, arguments, output.make_console())
    plot(results, arguments)


if __name__ == "__main__":
    main()
