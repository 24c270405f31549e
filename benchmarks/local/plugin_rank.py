"""One rank of plugin.py: times the plugin's steps inside one framework, with the parameters of VGG-16."""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1",
                  TF_NUM_INTEROP_THREADS="1")  # read once, when the frameworks are imported

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import launch
from benchmarks.data.gradients import Gradients
from benchmarks.local.step import pin_to_one_core
from horovod_oktopk.modes.reduction import Reduction
from horovod_oktopk.schemes.report import StepReport

WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
Arrays = list[np.ndarray[Any, Any]]
Framework = tuple[Callable[[Arrays], Any], Callable[[Any], StepReport]]
"""Arrays as the framework's gradients; and their reduction."""


def vgg16_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of VGG-16 for CIFAR-10, with batch normalisation: 14,728,266 parameters in all."""
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
        optimizer.synchronize()
        report = step_report(optimizer)
        assert report is not None
        return report

    return load, reduce


def tensorflow(density: float) -> Framework:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_oktopk.tensorflow import OkTopk, step_report
    from horovod_oktopk.tensorflow.registry import runs_of_tapes
    hvd.init()
    variables = [tf.Variable(tf.zeros(shape), name=f"{i:03}") for i, shape in enumerate(vgg16_shapes())]
    runs = runs_of_tapes(OkTopk(density), hvd.Average, hvd.global_process_set, False)
    reduced = tf.function(lambda gradients: runs.reduce_before_step(gradients, variables), autograph=False)

    def load(arrays: Arrays) -> list[Any]:
        return [tf.constant(array) for array in arrays]

    def reduce(gradients: list[Any]) -> StepReport:
        reduced(gradients)
        report = step_report(variables)
        assert report is not None
        return report

    return load, reduce


def measure(framework: str, density: float, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
    """Return the milliseconds of every step by phase, and MiB."""
    pin_to_one_core()
    Reduction.is_alone = False  # type: ignore[method-assign, assignment]  # one rank selects as several do
    load, reduce = {"pytorch": pytorch, "tensorflow": tensorflow}[framework](density)
    shapes = vgg16_shapes()
    n = sum(int(np.prod(shape)) for shape in shapes)
    gradients, vector = Gradients(n, seed), np.zeros(n, np.float32)
    samples: dict[str, list[float]] = {}
    for index in range(warm_up + steps):
        inputs = load(split(gradients, vector, shapes))
        start = time.perf_counter()
        report = reduce(inputs)
        seconds = time.perf_counter() - start
        if index >= warm_up:
            for name, value in by_phase(seconds, report).items():
                samples.setdefault(name, []).append(1e3 * value)
    return {"n": n, "k": report.k, "samples": samples, "memcpy": time_copies(vector),
            "temporaries_mib": temporaries(lambda: load(split(gradients, vector, shapes)), reduce)}


def time_copies(vector: np.ndarray[Any, Any]) -> list[float]:
    """Return the milliseconds of each of 11 copies."""
    target = np.zeros_like(vector)
    copies = []
    for _ in range(11):
        start = time.perf_counter()
        np.copyto(target, vector)
        copies.append(1e3 * (time.perf_counter() - start))
    return copies


def split(gradients: Gradients, vector: np.ndarray[Any, Any], shapes: list[tuple[int, ...]]) -> Arrays:
    """Return the next gradient, in an array for each parameter."""
    gradients.fill(vector)
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return [part.reshape(shape).copy() for part, shape in zip(np.split(vector, cuts), shapes, strict=True)]


def by_phase(seconds: float, report: StepReport) -> dict[str, float]:
    """Return the seconds by phase; what no phase of the report accounts for is the framework's."""
    phases = {name: traffic.seconds for name, traffic in report.phases.items()}
    known = {name: phases.pop(name.replace(" ", "_"), 0.0) for name in ("accumulate", "select", "write back")}
    known["reduce"] = sum(phases.values())
    return {**known, "framework": seconds - sum(known.values()), "step": seconds}


def temporaries(next_inputs: Callable[[], Any], reduce: Callable[[Any], StepReport]) -> float:
    """Return the MiB that the plugin allocates at most in one of 32 steps."""
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


if __name__ == "__main__":
    launch.run_rank(measure)
