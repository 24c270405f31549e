"""What a step of the plugin costs inside each framework, without the network: PyTorch beside TensorFlow.

    python -m benchmarks.local.plugin --json runs/plugin.json --plot runs/plugin.png

One rank, one core, the parameters of VGG-16; real Horovod. From all gradients computed to all gradients
reduced: the time a training step gets longer by. Each framework runs in processes of its own, in turns.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1",
                  TF_NUM_INTEROP_THREADS="1")  # read once, when the frameworks are imported

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.data.gradients import Gradients
from benchmarks.local.step import pin_to_one_core
from horovod_oktopk.schemes.report import StepReport

WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
PHASES = ("accumulate", "select", "reduce", "write back", "framework")
COLORS = dict(zip(PHASES, ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#999999"), strict=True))
NAMES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
Arrays = list[np.ndarray[Any, Any]]
Framework = tuple[Callable[[Arrays], Any], Callable[[Any], StepReport]]
"""Arrays as the framework's gradients; and their reduction."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=64, help="timed")
    parser.add_argument("--warm-up", type=int, default=32, help="steps before, in which the residual fills")
    parser.add_argument("--turns", type=int, default=3, help="processes of each framework")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("runs/plugin.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/plugin.png"))
    parser.add_argument("--framework", choices=NAMES, help=argparse.SUPPRESS)  # in the processes that measure
    return parser.parse_args()


def vgg16_shapes() -> list[tuple[int, ...]]:
    """VGG-16 for CIFAR-10, with batch normalisation: 14,728,266 parameters in all."""
    shapes: list[tuple[int, ...]] = []
    channels = 3
    for width in WIDTHS:
        shapes += [(width, channels, 3, 3), (width,), (width,), (width,)]
        channels = width
    return [*shapes, (10, 512), (10,)]


def pytorch(density: float) -> Framework:
    import horovod.torch as hvd
    import torch

    from horovod_oktopk.torch import OkTopk, step_report
    hvd.init()
    torch.set_num_threads(1)
    parameters = {f"{i:03}": torch.nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(vgg16_shapes())}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.1), compression=OkTopk(density),
                                         named_parameters=parameters.items())

    def load(arrays: Arrays) -> None:
        for p, array in zip(parameters.values(), arrays, strict=True):
            p.grad = torch.from_numpy(array)

    def reduce(_: None) -> StepReport:
        for p in parameters.values():  # what Horovod's hooks do as gradients become ready
            optimizer._handles[p] = optimizer._allreduce_grad_async(p)
        optimizer.synchronize()
        return step_report(optimizer)

    return load, reduce


def tensorflow(density: float) -> Framework:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_oktopk.tensorflow import OkTopk, step_report
    hvd.init()
    variables = [tf.Variable(tf.zeros(shape), name=f"{i:03}") for i, shape in enumerate(vgg16_shapes())]
    tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=OkTopk(density))
    reduced = tf.function(lambda gradients: tape._allreduce_grads(gradients, variables))

    def load(arrays: Arrays) -> list[Any]:
        return [tf.constant(array) for array in arrays]

    def reduce(gradients: list[Any]) -> StepReport:
        reduced(gradients)
        return step_report(variables)

    return load, reduce


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of every step by phase, in this process, and MiB."""
    pin_to_one_core()
    load, reduce = {"pytorch": pytorch, "tensorflow": tensorflow}[arguments.framework](arguments.density)
    shapes = vgg16_shapes()
    n = sum(int(np.prod(shape)) for shape in shapes)
    gradients, vector = Gradients(n, arguments.seed), np.zeros(n, np.float32)
    samples: dict[str, list[float]] = {name: [] for name in (*PHASES, "step")}
    for index in range(arguments.warm_up + arguments.steps):
        inputs = load(split(gradients, vector, shapes))
        start = time.perf_counter()
        report = reduce(inputs)
        seconds = time.perf_counter() - start
        if index >= arguments.warm_up:
            for name, value in by_phase(seconds, report).items():
                samples[name].append(1e3 * value)
    target = np.zeros_like(vector)
    copies = []
    for _ in range(11):
        start = time.perf_counter()
        np.copyto(target, vector)
        copies.append(1e3 * (time.perf_counter() - start))
    return {"n": n, "k": report.k, "samples": samples, "memcpy": copies,
            "temporaries_mib": temporaries(lambda: load(split(gradients, vector, shapes)), reduce)}


def split(gradients: Gradients, vector: np.ndarray[Any, Any], shapes: list[tuple[int, ...]]) -> Arrays:
    """The next gradient, in arrays of their own."""
    gradients.fill(vector)
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return [part.reshape(shape).copy() for part, shape in zip(np.split(vector, cuts), shapes, strict=True)]


def by_phase(seconds: float, report: StepReport) -> dict[str, float]:
    """Seconds by phase; what no phase of the report accounts for is the framework's."""
    phases = {name: traffic.seconds for name, traffic in report.phases.items()}
    known = {name: phases.pop(name.replace(" ", "_"), 0.0) for name in ("accumulate", "select", "write back")}
    known["reduce"] = sum(phases.values())
    return {**known, "framework": seconds - sum(known.values()), "step": seconds}


def temporaries(next_inputs: Callable[[], Any], reduce: Callable[[Any], StepReport]) -> float:
    """MiB that the plugin allocates at most in one of 32 steps."""
    peaks = []
    tracemalloc.start()
    for _ in range(32):
        inputs = next_inputs()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        reduce(inputs)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return max(peaks) / 2**20


def run_in_turns(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What every framework's processes measured, put together."""
    results: dict[str, dict[str, Any]] = {}
    processes = arguments.turns * len(NAMES)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=processes, unit="process") as progress:
        for _ in range(arguments.turns):
            for framework in NAMES:
                progress.set_description(NAMES[framework])
                outcome = Path(folder, "outcome.json")
                found = run(framework, arguments, outcome)
                if framework in results:
                    for name, values in found["samples"].items():
                        results[framework]["samples"][name] += values
                    results[framework]["memcpy"] += found["memcpy"]
                else:
                    results[framework] = found
                progress.update()
    return results


def run(framework: str, arguments: argparse.Namespace, outcome: Path) -> dict[str, Any]:
    """What one process measured."""
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", "1", "-H", "localhost:1", "--gloo"]
    command = [*launcher, sys.executable, "-m", __spec__.name, "--framework", framework, "--json", str(outcome),
               "--density", str(arguments.density), "--steps", str(arguments.steps),
               "--warm-up", str(arguments.warm_up), "--seed", str(arguments.seed)]
    job = subprocess.run(command, capture_output=True, text=True, check=False)
    if job.returncode:
        sys.exit(f"measuring {NAMES[framework]} failed:\n{job.stdout}{job.stderr}")
    found: dict[str, Any] = json.loads(outcome.read_text())
    return found


def show(results: dict[str, dict[str, Any]], console: Console) -> None:
    first = next(iter(results.values()))
    table = Table(title=f"The plugin's cost of a step, n = {first['n']:,}, k = {first['k']:,}; mean milliseconds")
    table.add_column("")
    for heading in (*PHASES, "step", "median", "memcpy of n"):
        table.add_column(heading, justify="right")
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


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    for row, outcome in enumerate(results.values()):
        left = 0.0
        for phase in PHASES:
            width = statistics.mean(outcome["samples"][phase])
            axes.barh(row, width, left=left, color=COLORS[phase], label=phase if row == 0 else None)
            left += width
        axes.annotate(f"{left:.1f}", (left, row), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(results)), [NAMES[framework] for framework in results])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds (mean)")
    axes.set_title(f"The plugin's cost of a step on one core, n = {next(iter(results.values()))['n']:,}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.3))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = parse_arguments()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    if arguments.framework is not None:
        arguments.json.write_text(json.dumps(measure(arguments)))
        return
    results = run_in_turns(arguments)
    console = Console()
    show(results, console if console.is_terminal else Console(width=110))
    arguments.json.write_text(json.dumps(results))
    try:
        plot(results, arguments.plot)
    except ImportError:
        print("No plot: matplotlib is not installed.")


if __name__ == "__main__":
    main()
