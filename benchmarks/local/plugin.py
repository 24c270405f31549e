"""Cost of a step of the plugin inside each framework, without the network: PyTorch beside TensorFlow.

    python -m benchmarks.local.plugin --json runs/plugin.json --plot runs/plugin.png

One rank, which selects as several do; one core, the parameters of VGG-16; real Horovod. From all gradients computed
to all gradients reduced: the time a training step gets longer by. Each framework runs in its own processes, in turns.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks import launch, output
from benchmarks.output import BLUE, GREEN, GREY, ORANGE, VIOLET

PHASES = ("accumulate", "select", "reduce", "write back", "framework")
COLORS = dict(zip(PHASES, (BLUE, ORANGE, GREEN, VIOLET, GREY), strict=True))
NAMES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
TIMEOUT = 600.0
Results = dict[str, dict[str, Any]]
"""By framework."""


def run_in_turns(arguments: argparse.Namespace) -> Results:
    """Return the measurements of every framework's processes together."""
    settings = {name: getattr(arguments, name) for name in ("density", "steps", "warm_up", "seed")}
    results: Results = {}
    for framework in tqdm(list(NAMES) * arguments.turns, unit="process"):
        found = launch.measured(launch.horovodrun(1, "gloo"), "benchmarks.local.plugin_rank",
                                {"framework": framework, **settings}, TIMEOUT)
        known = results.setdefault(framework, found)
        if known is not found:
            for name, values in found["samples"].items():
                known["samples"][name] += values
            known["memcpy"] += found["memcpy"]
    return results


def show(results: Results, console: Console) -> None:
    first = next(iter(results.values()))
    table = output.make_table(
        f"The plugin's cost of a step, n = {first['n']:,}, k = {first['k']:,}; mean milliseconds", [""],
        [*PHASES, "step", "median", "memcpy of n"])
    for framework, outcome in results.items():
        samples = outcome["samples"]
        table.add_row(NAMES[framework], *(f"{statistics.mean(samples[name]):.1f}" for name in (*PHASES, "step")),
                      f"{statistics.median(samples['step']):.1f}", f"{statistics.median(outcome['memcpy']):.1f}")
    console.print(table)
    ratio = {name: summary(results["tensorflow"]["samples"]["step"])[name] / value
             for name, value in summary(results["pytorch"]["samples"]["step"]).items()}
    console.print(f"TensorFlow's step costs {ratio['mean']:.2f} times PyTorch's (median {ratio['median']:.2f}). "
                  + "Temporaries peak at " + ", ".join(
                      f"{outcome['temporaries_mib']:.1f} MiB ({NAMES[framework]})"
                      for framework, outcome in results.items())
                  + f"; the gradient has {first['n'] * 4 / 2**20:.1f} MiB.")


def summary(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "median": statistics.median(values)}


def plot(results: Results, arguments: argparse.Namespace) -> None:
    figure, axes = output.load_pyplot().subplots(figsize=(8, 2.6), layout="constrained")
    parts = {phase: [statistics.mean(outcome["samples"][phase]) for outcome in results.values()] for phase in PHASES}
    ends = output.stacked_bars(axes, [NAMES[framework] for framework in results], parts, COLORS)
    output.label_ends(axes, ends)
    axes.margins(x=0.12)
    axes.set(xlabel="milliseconds (mean)",
             title=f"The plugin's cost of a step on one core, n = {next(iter(results.values()))['n']:,}")
    axes.legend(frameon=False, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.3))
    output.save(figure, arguments.plot)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "plugin")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=64, help="timed")
    parser.add_argument("--warm-up", type=int, default=32, help="steps before, in which the residual fills")
    parser.add_argument("--turns", type=int, default=3, help="processes of each framework")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    results = run_in_turns(arguments)
    show(results, output.make_console())
    output.write_json(arguments.json, results)
    plot(results, arguments)


if __name__ == "__main__":
    main()
