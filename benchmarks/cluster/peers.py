"""Seconds of a pass by peers of this package in PyTorch, on a cluster of network namespaces; without Horovod.

    sudo .venv/bin/python -m benchmarks.cluster.peers --hosts 4 --rate 1gbit --dilation 2

What they reach is in benchmarks.accuracy.peers. It needs root and iproute2.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import launch, output
from benchmarks.cluster.hosts import SUBNET, add_arguments, check_machine, cluster, dilated, in_words
from benchmarks.cluster.training import MODELS


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each method the seconds of a pass, and the bytes that a rank sends for one."""
    settings = {"model": arguments.model, "warm_up": arguments.warm_up, "passes": arguments.passes,
                "address": f"{SUBNET}.1"}
    with cluster(arguments.hosts, dilated(arguments.rate, arguments.dilation)) as hosts:
        found: list[dict[str, Any]] = launch.measured(hosts.mpirun(), "benchmarks.cluster.peers_rank", settings,
                                                      arguments.timeout)
    return [{**each, "seconds": each["seconds"] / arguments.dilation} for each in found]


def show(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    dense = results[0]
    table = output.make_table(
        f"{arguments.model}, {MODELS[arguments.model]:,} parameters, {arguments.hosts} hosts at "
        f"{in_words(arguments.rate)}: a pass", ["method"], ["seconds", "MB sent", "passes faster than DDP"])
    for each in results:
        table.add_row(each["peer"], f"{each['seconds']:.3f}", f"{each['bytes_sent'] / 1e6:.2f}",
                      f"{dense['seconds'] / each['seconds']:.1f}")
    output.make_console().print(table)


def plot(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    names = [each["peer"] for each in results]
    figure, axes = output.load_pyplot().subplots(figsize=(7, 3.4), layout="constrained")
    bars = axes.barh(names, [each["seconds"] for each in results],
                     color=[output.ORANGE if "OkTopk" in name else output.BLUE for name in names])
    axes.bar_label(bars, fmt=" %.2f", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a pass",
             title=f"{arguments.model} on {arguments.hosts} hosts at {in_words(arguments.rate)}")
    output.save(figure, arguments.plot)


def main(line: list[str] | None = None) -> None:
    parser = output.make_parser(__doc__, "cluster_peers")
    add_arguments(parser)
    parser.set_defaults(hosts=4)
    parser.add_argument("--model", choices=list(MODELS), default="vgg16")
    parser.add_argument("--warm-up", type=int, default=8, help="passes of each method before those timed")
    parser.add_argument("--passes", type=int, default=12, help="timed; a multiple of 4, as some send in each fourth")
    arguments = parser.parse_args(line)
    check_machine(arguments.hosts, arguments.rate, MODELS[arguments.model])
    launch.end_cleanly_on_sigterm()
    results = measure(arguments)
    output.write_json(arguments.json, results)
    show(results, arguments)
    plot(results, arguments)


if __name__ == "__main__":
    main()
