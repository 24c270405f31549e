"""Peers of this package in PyTorch, on the same work: what is reached after equally many passes, and the bytes.

    python -m benchmarks.accuracy.peers --tasks cnn --json docs/data/peers.json --plot docs/images/peers.png

Each method has the rate, a multiple of dense's, that is best for it with the first seed; then come the other seeds.
4 ranks under torchrun; ours have density 1 %. What is measured already in the JSON file is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from benchmarks import launch, output
from benchmarks.accuracy.peers_ranks import PEERS

LINES = {"cnn": ["--epochs", "20"], "gpt": ["--epochs", "2", "--batch-size", "3"]}
"""Arguments by task: of benchmarks.accuracy.pytorch_digits and pytorch_text."""
BASE = {"cnn": 0.0125, "gpt": 0.00025}
"""Dense training's learning rate, for each rank."""
BEST_IS_HIGH = {"cnn": True, "gpt": False}
Found = dict[str, dict[str, float]]
"""Metric and bytes a step by task, peer, rate and seed, written as one key."""


def key_of(task: str, peer: str, rate: float, seed: int) -> str:
    return f"{task} | {peer} | {rate:g} | {seed}"


def measure(arguments: argparse.Namespace) -> Found:
    """Measure what the JSON file lacks, and return all of it."""
    found: Found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    with tqdm(total=len(arguments.tasks) * len(arguments.peers) * (len(arguments.rates) + arguments.seeds - 1),
              unit="training") as bar:
        def train(task: str, peer: str, runs: list[tuple[float, int]]) -> None:
            missing = [(rate, seed) for rate, seed in runs if key_of(task, peer, rate, seed) not in found]
            lines = [(peer, [*LINES[task], "--lr", repr(rate * BASE[task]), "--seed", str(seed)])
                     for rate, seed in missing]
            rows = launch.measured(launch.torchrun(arguments.ranks), "benchmarks.accuracy.peers_rank",
                                   {"task": task, "runs": lines}, arguments.timeout) if lines else []
            found.update({key_of(task, peer, *run): row for run, row in zip(missing, rows, strict=True)})
            output.write_json(arguments.json, found)
            bar.update(len(runs))

        for task in arguments.tasks:
            for peer in arguments.peers:
                train(task, peer, [(rate, 1) for rate in arguments.rates])
                rate = best_rate(found, task, peer)
                train(task, peer, [(rate, seed) for seed in range(2, arguments.seeds + 1)])
    return found


def best_rate(found: Found, task: str, peer: str) -> float:
    """Return the multiple of dense's rate that is best with the first seed."""
    tried = {float(key.split(" | ")[2]): each["metric"] for key, each in found.items()
             if key.split(" | ")[:2] == [task, peer] and key.endswith("| 1")}
    sign = -1 if BEST_IS_HIGH[task] else 1
    return min(tried, key=lambda rate: sign * tried[rate] if math.isfinite(tried[rate]) else math.inf)


def rows(found: Found, task: str) -> list[tuple[str, float, list[float], float]]:
    """Return peer, rate, the metric of each seed, and the bytes of a step, for each peer that was measured."""
    table = []
    for peer in PEERS:
        if not any(key.startswith(f"{task} | {peer} | ") for key in found):
            continue
        rate = best_rate(found, task, peer)
        runs = [each for key, each in found.items() if key.startswith(f"{task} | {peer} | {rate:g} | ")]
        table.append((peer, rate, [each["metric"] for each in runs], runs[0]["bytes_per_step"]))
    return table


def show(found: Found, tasks: list[str], console: Console) -> None:
    for task in tasks:
        high = BEST_IS_HIGH[task]
        table = output.make_table(f"{task}: {'accuracy' if high else 'validation loss'}, mean (range)", ["method"],
                                  ["rate / dense's", "accuracy" if high else "loss", "bytes a step / DDP's"])
        measured = rows(found, task)
        dense = measured[0][3]
        for peer, rate, values, sent in measured:
            shown = [f"{100 * each:.2f} %" if high else f"{each:.4f}"
                     for each in (statistics.mean(values), min(values), max(values))]
            table.add_row(peer, f"{rate:g}", f"{shown[0]} ({shown[1]} to {shown[2]})", f"{sent / dense:.4f}")
        console.print(table)


def plot(found: Found, task: str, path: Path) -> None:
    """Plot the metric's mean and range against the bytes of a step."""
    pyplot = output.load_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    colours = pyplot.get_cmap("tab20")  # there are more than ten
    unit = 100 if BEST_IS_HIGH[task] else 1
    for number, (peer, _, values, sent) in enumerate(rows(found, task)):
        mean = statistics.mean(values)
        spread = [[unit * (mean - min(values))], [unit * (max(values) - mean)]]
        is_ours = "OkTopk" in peer or "SameBlocks" in peer
        axes.errorbar([sent], [unit * mean], spread, fmt="*" if is_ours else "o", capsize=3,
                      markersize=12 if is_ours else 6, color=colours(number), label=peer)
    axes.set(xscale="log", xlabel="bytes that a rank sends in the mean step",
             ylabel="test accuracy (%)" if BEST_IS_HIGH[task] else "validation loss", title=f"{task}, three seeds")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    output.save(figure, path)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "peers")
    parser.add_argument("--tasks", nargs="+", choices=list(LINES), default=list(LINES))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="all, if not given")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0], help="multiples of dense's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for the trainings of one method")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    found = measure(arguments)
    show(found, arguments.tasks, output.make_console())
    plot(found, arguments.tasks[0], arguments.plot)


if __name__ == "__main__":
    main()
