"""The cost of one OkTopk step without the network: one rank, one core, the gradient of a VGG-16-sized model.

    python -m benchmarks.local.step --json runs/step.json --plot runs/step.png

Every phase is timed, with the kernels in C++ and, in turns with them, with those in NumPy, and now and
then what else could be done with the same vector: a memcpy, NumPy's partition, PyTorch's topk.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when NumPy and PyTorch are imported

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from tqdm import tqdm

from benchmarks import output
from benchmarks.data.gradients import Gradients
from benchmarks.output import BLUE, GREEN, GREY, ORANGE, VIOLET
from horovod_oktopk import OkTopk
from horovod_oktopk.kernels import KERNELS, Kernels, NumpyKernels
from horovod_oktopk.modes.step_ahead.model import correction_of_p
from horovod_oktopk.phases.agreement import Attendance
from horovod_oktopk.schemes import step as steps_of_schemes
from horovod_oktopk.schemes.algorithm import Memory
from horovod_oktopk.selection import global_top_k, local_top_k
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.transport.collectives import AloneTransport
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.vectors import sparse
from horovod_oktopk.vectors.sparse import SparseVector
from horovod_oktopk.vectors.wire import WireCodec

PHASES = ("accumulate", "select", "reduce", "write-back")
SPARSIFICATION = ("accumulate", "select", "write-back")
WITH_TOPK = "all with torch.topk"
"""Sparsification as one would write it in PyTorch."""
COLORS = dict(zip(PHASES, (BLUE, ORANGE, GREEN, VIOLET), strict=True))
AHEAD = "StepAhead"
Gradient = NDArray[np.float32]
Samples = dict[str, list[float]]
"""Milliseconds by name."""


class Step:
    """One rank's step through the core, as an integration takes it, with these kernels."""

    def __init__(self, n: int, density: float, kernels: Kernels) -> None:
        options = OkTopk(density=density)
        self.k = options.k_of(n)
        self.kernels = kernels
        self.acc = NumpyAccumulator(n, kernels=kernels)
        self.algorithm, self.memory = options.algorithm(), Memory()
        self.transport = CountingTransport(AloneTransport())

    def run(self, gradient: Gradient) -> dict[str, float]:
        """Reduce the gradient in place. Return the seconds by phase."""
        sparse.KERNELS = global_top_k.KERNELS = local_top_k.KERNELS = self.kernels  # type: ignore[attr-defined]
        steps_of_schemes.WireCodec = partial(WireCodec, kernels=self.kernels)  # type: ignore[assignment, misc, attr-defined]
        self.transport.reset()
        times = [time.perf_counter()]
        finite = self.acc.accumulate([(0, gradient)], clear=True)
        times.append(time.perf_counter())
        said = Attendance("", self.k, finite=finite)
        outcome = steps_of_schemes.reduce(self.algorithm, self.acc, said, self.memory, self.transport)
        times.append(time.perf_counter())
        self.memory, result = outcome.memory, outcome.result
        assert result is not None
        self.acc.commit(result.contributed, result.remainder)
        write_back(result.update, gradient)
        times.append(time.perf_counter())
        accumulate, reduce, write = (stop - start for start, stop in pairwise(times))
        select = self.transport.phases["select"].seconds
        return dict(zip(PHASES, (accumulate, select, reduce - select, write), strict=True))


class AheadStep:
    """The same with StepAhead: a rank's parameters p move, and w - p is reduced."""

    def __init__(self, n: int, density: float) -> None:
        options = OkTopk(density=density)
        self.k = options.k_of(n)
        self.kernels = KERNELS
        self.acc = NumpyParameterAccumulator(n)
        self.p = np.zeros(n, np.float32)
        self.acc.start([(0, self.p)])
        self.algorithm, self.memory = options.algorithm(), Memory()
        self.transport = CountingTransport(AloneTransport())

    def run(self, gradient: Gradient) -> dict[str, float]:
        """Move the parameters, untimed, and exchange the move. Return the seconds by phase."""
        sparse.KERNELS = global_top_k.KERNELS = local_top_k.KERNELS = self.kernels  # type: ignore[attr-defined]
        steps_of_schemes.WireCodec = WireCodec  # type: ignore[misc, attr-defined]
        self.p -= gradient
        self.transport.reset()
        times = [time.perf_counter()]
        finite = self.acc.accumulate([(0, self.p)])
        times.append(time.perf_counter())
        said = Attendance("", self.k, finite=finite)
        begun = steps_of_schemes.begin(self.algorithm, self.acc, said, self.memory, self.transport)
        times.append(time.perf_counter())
        outcome = steps_of_schemes.complete(begun)
        times.append(time.perf_counter())
        self.memory, result = outcome.memory, outcome.result
        assert result is not None
        update = result.update.divided(1.0)
        self.acc.commit(update)
        delta = correction_of_p(update, result)
        self.kernels.add(self.p, delta.indices, delta.values)
        times.append(time.perf_counter())
        seconds = [stop - start for start, stop in pairwise(times)]
        return dict(zip(PHASES, seconds, strict=True))


def write_back(update: SparseVector, gradient: Gradient) -> None:
    """Write the sparse update into the gradient, which the accumulation has cleared."""
    sparse.KERNELS.scatter(gradient, update.indices, update.values, zero=True)  # type: ignore[attr-defined]


def sparsify_with_topk(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> None:
    """Do in plain PyTorch what all phases of a step but "reduce" do."""
    residual += gradient
    indices = residual.abs().topk(k, sorted=False).indices
    gradient.zero_()
    gradient[indices] = residual[indices]
    residual[indices] = 0


AnyStep = Step | AheadStep


class Others:
    """Other things to do with a vector of n elements, for comparison."""

    def __init__(self, n: int, k: int) -> None:
        self.gradient, target = np.zeros(n, np.float32), np.ones(n, np.float32)
        gradient, tensor, residual = self.gradient, torch.from_numpy(self.gradient), torch.zeros(n)
        self.operations: dict[str, Callable[[], object]] = {
            "memcpy of n": lambda: np.copyto(target, gradient),
            "np.partition": lambda: np.partition(np.abs(gradient), n - k),
            "torch.topk": lambda: tensor.abs().topk(k, sorted=False),
            WITH_TOPK: lambda: sparsify_with_topk(residual, tensor, k)}

    def run(self, gradient: Gradient) -> dict[str, float]:
        """Return the seconds of each, with this gradient."""
        seconds = {}
        for name, operation in self.operations.items():
            self.gradient[:] = gradient
            start = time.perf_counter()
            operation()
            seconds[name] = time.perf_counter() - start
        return seconds


def measure(steps: dict[str, AnyStep], others: Others, gradients: Gradients, gradient: Gradient,
            arguments: argparse.Namespace) -> tuple[dict[str, Samples], Samples]:
    """Return milliseconds by kind of step and phase, and by other operation.

    Every gradient goes to all kinds in turn. The other operations run now and then between steps, as the machine's
    speed changes.
    """
    kinds: dict[str, Samples] = {kind: {name: [] for name in (*PHASES, "step")} for kind in steps}
    compared: Samples = {name: [] for name in others.operations}
    drawn = np.empty_like(gradient)
    others.run(gradient)  # memory is mapped before the clock runs
    for index in tqdm(range(-arguments.warm_up, arguments.steps), desc="steps", unit="step"):
        gradients.fill(drawn)
        for kind, step in steps.items():
            gradient[:] = drawn
            seconds = step.run(gradient)
            if index >= 0:
                for name, value in (*seconds.items(), ("step", sum(seconds.values()))):
                    kinds[kind][name].append(1e3 * value)
        if index >= 0 and index % arguments.every == 0:
            for name, value in others.run(drawn).items():
                compared[name].append(1e3 * value)
    return kinds, compared


def measure_memory(step: AnyStep, gradients: Gradients, gradient: Gradient) -> dict[str, float]:
    """Return MiB: what is held between steps beyond the gradient, and the peak that one step adds to it.

    Run steps of their own for it, as tracing slows them down.
    """
    peaks = []
    tracemalloc.start()
    for _ in tqdm(range(32), desc="memory", unit="step"):
        gradients.fill(gradient)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        step.run(gradient)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    arrays = [*vars(step.acc).values(), *vars(step.acc._candidates).values()]
    held = sum(value.nbytes for value in arrays if isinstance(value, np.ndarray))
    mib = float(2**20)
    return {"gradient": gradient.nbytes / mib, "resident": held / mib,
            "step_peak_median": statistics.median(peaks) / mib, "step_peak_max": max(peaks) / mib}


def summary(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "median": statistics.median(values), "max": max(values)}


def show(results: dict[str, Any], console: Console) -> None:
    table = output.make_table(f"One step on one core, n = {results['n']:,}, k = {results['k']:,}; milliseconds",
                              [""], ["mean", "median", "max"])
    for kind, phases in results["steps"].items():
        for phase, figures in phases.items():
            table.add_row(f"{kind}: {phase}", *(f"{value:.1f}" for value in figures.values()),
                          end_section=phase == "step", style="bold" if phase == "step" else None)
    for name, figures in results["others"].items():
        table.add_row(name, *(f"{value:.1f}" for value in figures.values()))
    console.print(table)
    for kind, phases in results["steps"].items():
        mean = sum(phases[phase]["mean"] for phase in SPARSIFICATION)
        memcpy, topk = (results["others"][name]["mean"] for name in ("memcpy of n", WITH_TOPK))
        console.print(f"{kind}: {', '.join(SPARSIFICATION)} take {mean:.1f} ms in all, {mean / memcpy:.1f} times a "
                      f"memcpy of n; with torch.topk they take {topk / mean:.1f} times as long.")
    for kind, memory in results["memory_mib"].items():
        console.print(f"{kind}: beside model and gradient ({memory['gradient']:.1f} MiB each) "
                      f"{memory['resident']:.1f} MiB between steps, {memory['resident'] / memory['gradient']:.2f} n; "
                      f"a step's temporaries peak at {memory['step_peak_median']:.1f} MiB (median) and "
                      f"{memory['step_peak_max']:.1f} MiB (max).")


def plot(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Plot mean times beside the other operations: means of the phases add up to that of the step."""
    figure, axes = output.load_pyplot().subplots(figsize=(8, 3.6), layout="constrained")
    steps, others = results["steps"], results["others"]
    rows = [*(f"OkTopk, {kind}" for kind in steps), *others]
    none = [0.0] * len(others)
    parts = {phase: [*(phases[phase]["mean"] for phases in steps.values()), *none] for phase in PHASES}
    ends = output.stacked_bars(axes, rows, parts, COLORS)
    means = [figures["mean"] for figures in others.values()]
    axes.barh(range(len(steps), len(rows)), means, color=GREY)
    ends[len(steps):] = means
    output.label_ends(axes, ends)
    axes.set(xlim=(0, 1.12 * max(ends)), xlabel="milliseconds (mean)",
             title=f"One step on one core, n = {results['n']:,}, k = {results['k']:,}")
    axes.legend(frameon=False, loc="upper right")
    output.save(figure, arguments.plot)


def pin_to_one_core() -> None:
    """Use only the last core of this process; where a system cannot pin, its threads are limited all the same."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "step")
    parser.add_argument("--n", type=int, default=14_728_266, help="elements (default: VGG-16 for CIFAR-10)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=97, help="timed")
    parser.add_argument("--warm-up", type=int, default=32, help="steps before, in which the residual fills")
    parser.add_argument("--every", type=int, default=8, help="so many steps, time what is compared with")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    pin_to_one_core()
    torch.set_num_threads(1)
    gradient = np.zeros(arguments.n, np.float32)
    gradients = Gradients(arguments.n, arguments.seed)
    steps: dict[str, AnyStep] = {kernels.name: Step(arguments.n, arguments.density, kernels)
                                 for kernels in (KERNELS, NumpyKernels())}
    steps[AHEAD] = AheadStep(arguments.n, arguments.density)
    step = steps[KERNELS.name]
    kinds, others = measure(steps, Others(arguments.n, step.k), gradients, gradient, arguments)
    results = {"n": arguments.n, "k": step.k, "density": arguments.density,
               "steps": {kind: {name: summary(values) for name, values in samples.items()}
                         for kind, samples in kinds.items()},
               "others": {name: summary(values) for name, values in others.items()},
               "memory_mib": {kind: measure_memory(steps[kind], gradients, gradient)
                              for kind in (KERNELS.name, AHEAD)}}
    show(results, output.make_console())
    output.write_json(arguments.json, results)
    plot(results, arguments)


if __name__ == "__main__":
    main()
