"""The cost of one OkTopk step on a GPU without the network: gradients of a real model's shape on the device.

    python -m benchmarks.local.device --n 14728266 110000000 1000000000

Every phase is timed to the end of what it has started on the device, and in turns with it what else could be done
with the same vector there: a copy of n, and the same sparsification with torch.topk. With --device cpu the same code
runs on tensors in host memory, which says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks import output
from benchmarks.local.step import COLORS, PHASES, SPARSIFICATION, WITH_TOPK, sparsify_with_topk, summary
from benchmarks.output import GREY
from horovod_oktopk import OkTopk
from horovod_oktopk.phases.agreement import Attendance
from horovod_oktopk.schemes.algorithm import Memory
from horovod_oktopk.schemes.step import reduce
from horovod_oktopk.torch_base.device import TorchAccumulator
from horovod_oktopk.torch_base.tensors import DenseGradients, TorchLayout
from horovod_oktopk.transport.collectives import AloneTransport
from horovod_oktopk.transport.counting import CountingTransport

COPY = "copy of n"
TENSORS = 200
"""About as many as BERT has."""


class Device:
    """Device under test. Its clock waits for what has been started there."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"

    def now(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def reset_peak(self) -> int:
        """Forget the peak of memory; return the bytes that are held now."""
        if not self.is_cuda:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    @property
    def description(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_cuda else platform.processor() or "CPU"


class DeviceStep:
    """One rank's step through the core, on gradients of TENSORS parameters, as PyTorch's integration takes it."""

    def __init__(self, n: int, density: float, device: Device) -> None:
        options = OkTopk(density=density)
        self.k = options.k_of(n)
        self.device = device
        self.flat = torch.zeros(n, device=device.device)
        self.layout = TorchLayout({f"p{index}": part for index, part in enumerate(self.flat.tensor_split(TENSORS))})
        self.gradients = self.flat.tensor_split(TENSORS)
        for p, gradient in zip(self.layout.parameters, self.gradients, strict=True):
            p.grad = gradient
        self.acc = TorchAccumulator(n, np.float32, device.device)
        self.algorithm, self.memory = options.algorithm(), Memory()
        self.transport = CountingTransport(AloneTransport())

    def run(self) -> dict[str, float]:
        """Reduce the gradients in place. Return the seconds by phase."""
        self.transport.reset()
        gradients = DenseGradients(self.layout)
        pieces = list(zip(self.layout.offsets[:-1].tolist(), self.gradients, strict=True))
        times = [self.device.now()]
        finite = self.acc.accumulate(pieces, clear=True)
        times.append(self.device.now())
        outcome = reduce(self.algorithm, self.acc, Attendance("", self.k, finite=finite), self.memory, self.transport)
        times.append(self.device.now())
        self.memory, result = outcome.memory, outcome.result
        assert result is not None
        self.acc.commit(result.contributed, result.remainder)
        gradients.write(result.update, cleared=True)
        times.append(self.device.now())
        accumulate, exchange, write = (stop - start for start, stop in pairwise(times))
        select = self.transport.phases["select"].seconds
        return dict(zip(PHASES, (accumulate, select, exchange - select, write), strict=True))


def others_of(step: DeviceStep) -> dict[str, Callable[[], object]]:
    """Return other things to do with the gradient, for comparison; they have 2 n elements of memory."""
    target, residual = torch.empty_like(step.flat), torch.zeros_like(step.flat)
    return {COPY: lambda: target.copy_(step.flat),
            "torch.topk": lambda: step.flat.abs().topk(step.k, sorted=False),
            WITH_TOPK: lambda: sparsify_with_topk(residual, step.flat, step.k)}


def measure(n: int, device: Device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds and bytes of one size."""
    step = DeviceStep(n, arguments.density, device)
    operations = others_of(step)
    random = torch.Generator(device.device).manual_seed(arguments.seed)
    phases: dict[str, list[float]] = {name: [] for name in (*PHASES, "step")}
    others: dict[str, list[float]] = {name: [] for name in operations}
    peaks = []
    for index in tqdm(range(-arguments.warm_up, arguments.steps), desc=f"n = {n:,}", unit="step"):
        step.flat.normal_(generator=random)
        held = device.reset_peak()
        seconds = step.run()
        if index >= 0:
            peaks.append(device.peak() - held)
            for name, value in (*seconds.items(), ("step", sum(seconds.values()))):
                phases[name].append(1e3 * value)
        for name, operation in operations.items():
            step.flat.normal_(generator=random)
            start = device.now()
            operation()
            if index >= 0:
                others[name].append(1e3 * (device.now() - start))
    return {"n": n, "k": step.k, "peak_bytes": max(peaks), "phases": {name: summary(v) for name, v in phases.items()},
            "others": {name: summary(v) for name, v in others.items()}}


def sparsification(result: dict[str, Any]) -> float:
    """Return the median milliseconds of all phases that touch n elements."""
    return sum(result["phases"][phase]["median"] for phase in SPARSIFICATION)


def show(results: dict[str, Any], console: Console) -> None:
    sizes = results["sizes"]
    table = output.make_table(f"One step on {results['device']}, density {results['density']}; median milliseconds",
                              [""], [f"n = {size['n']:,}" for size in sizes])
    for kind in ("phases", "others"):
        for name in sizes[0][kind]:
            table.add_row(name, *(f"{size[kind][name]['median']:.3f}" for size in sizes), end_section=name == "step",
                          style="bold" if name == "step" else None)
    table.add_row("sparsification, in copies of n",
                  *(f"{sparsification(size) / size['others'][COPY]['median']:.1f}" for size in sizes))
    table.add_row("temporaries of a step, in n",
                  *(f"{size['peak_bytes'] / 4 / size['n']:.2f}" if size["peak_bytes"] else "–" for size in sizes))
    console.print(table)


def plot(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Plot times in copies of n elements, so that all sizes fit into one picture."""
    sizes = results["sizes"]
    figure, axes = output.load_pyplot().subplots(figsize=(8, 1.6 + 0.9 * len(sizes)), layout="constrained")
    rows = [row for size in sizes for row in (f"OkTopk, n = {size['n']:,}", WITH_TOPK)]

    def in_copies(size: dict[str, Any], kind: str, name: str) -> float:
        return float(size[kind][name]["median"] / size["others"][COPY]["median"])

    parts = {phase: [value for size in sizes for value in (in_copies(size, "phases", phase), 0.0)]
             for phase in PHASES}
    parts["torch.topk"] = [value for size in sizes for value in (0.0, in_copies(size, "others", WITH_TOPK))]
    ends = output.stacked_bars(axes, rows, parts, {**COLORS, "torch.topk": GREY})
    output.label_ends(axes, ends)
    axes.set(xlim=(0, 1.12 * max(ends)), xlabel="times a copy of n on the device (medians)",
             title=f"One step on {results['device']}")
    output.legend_below(figure, axes)
    output.save(figure, arguments.plot)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "device")
    parser.add_argument("--n", type=int, nargs="+", default=[14_728_266, 110_000_000],
                        help="elements (VGG-16 for CIFAR-10, BERT)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--device", default="cuda", help="PyTorch's name of it (cuda)")
    parser.add_argument("--steps", type=int, default=60, help="timed")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before, in which the residual fills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(line)
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device here; --device cpu runs the same code on tensors in host memory")
    return arguments


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    device = Device(arguments.device)
    results = {"device": device.description, "torch": torch.__version__, "density": arguments.density,
               "sizes": [measure(n, device, arguments) for n in arguments.n]}
    show(results, output.make_console())
    output.write_json(arguments.json, results)
    plot(results, arguments)


if __name__ == "__main__":
    main()
