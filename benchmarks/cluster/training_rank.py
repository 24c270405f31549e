"""One rank of training.py: trains a model by each scheme, and times the steps and their parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import horovod_oktopk.torch as plugin
from benchmarks import launch
from benchmarks.data.models import WORKLOADS, Workload

AT_REST = 60
"""Steps with one density after which it is found, if it sets itself: a search changes it after 28."""
DENSE = {"Dense": plugin.Dense, "float16": hvd.Compression.fp16}
LOCAL_PHASES = ("accumulate", "host_sum", "select", "sum", "write_back")
Scheme = tuple[str, str, dict[str, Any]]
"""Name in the results, class, and options beside the density."""
Figures = dict[str, float]


def measure(model: str, schemes: list[Scheme], density: float, warm_up: int, steps: int) -> list[dict[str, Any]]:
    """Return median seconds of a step and of its parts, for each scheme."""
    hvd.init(process_sets="dynamic" if any("hierarchical" in options for *_, options in schemes) else None)
    torch.set_num_threads(1)
    workload = WORKLOADS[model]
    found = []
    for name, kind, options in schemes:
        computation = of_all_ranks(median_step(make_step(workload, None), 2, steps))["step"]
        dense = kind in DENSE
        compression = DENSE[kind] if dense else compression_of(kind, density, options)
        searches = options.get("density") == "auto"
        before = 1 if dense else warm_up
        figures = of_all_ranks(median_step(make_step(workload, compression), before, steps, searches))
        overlapped = dense or (kind.startswith("StepAhead") and options.get("overlap", True))
        found.append({"model": model, "scheme": name, **parts_of(figures, computation, overlapped)})
    return found


def compression_of(kind: str, density: float, options: dict[str, Any]) -> Any:
    overlap, options = options.get("overlap", True), {k: v for k, v in options.items() if k != "overlap"}
    if kind == "StepAhead":
        return plugin.StepAhead(plugin.OkTopk(**{"density": density, **options}), overlap=overlap)
    if kind == "StepAhead(SameBlocks)":
        return plugin.StepAhead(plugin.SameBlocks(**options), overlap=overlap)
    return getattr(plugin, kind)(density=density, **options)


def of_all_ranks(mine: Figures) -> Figures:
    """Return the step of the slowest rank, and means of everything else."""
    everyone = {name: hvd.allgather_object(value) for name, value in mine.items()}
    return {name: max(values) if name == "step" else statistics.mean(values) for name, values in everyone.items()}


def parts_of(figures: Figures, computation: float, overlapped: bool) -> dict[str, Any]:
    """Return the seconds of a step by part. computation: seconds of a step without communication.

    overlapped: messages run during the backward pass, so their part is what the step takes longer for them.
    """
    step, sparsification = figures["step"], figures.get("sparsification", 0.0)
    exposed = max(0.0, step - computation - sparsification)
    communication = exposed if overlapped else figures.get("communication", exposed)
    return {"step": step, "sparsification": sparsification, "communication": communication,
            "computation": step - sparsification - communication, "computation_alone": computation,
            **{name: figures.get(name) for name in ("bytes_sent", "density", "found_after")}}


def make_step(workload: Workload, compression: Any) -> Callable[[], Figures]:
    """Return a training step of a new model; without a compression, it is on this rank alone."""
    torch.manual_seed(1)
    model = workload.make()
    optimizer: Any = workload.optimizer(model.parameters())
    if compression is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    batches = workload.batches(workload.batch, hvd.rank())

    def step() -> Figures:
        batch = next(batches)
        hvd.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        figures = {"step": time.perf_counter() - start}
        report = None if compression in (None, *DENSE.values()) else plugin.step_report(optimizer)
        if report is not None:
            local = sum(report.phases[name].seconds for name in LOCAL_PHASES if name in report.phases)
            figures |= {"sparsification": local, "communication": report.seconds - local,
                        "bytes_sent": report.bytes_sent, "density": report.density}
        return figures

    return step


def median_step(step: Callable[[], Figures], warm_up: int, steps: int, searches: bool = False) -> Figures:
    """Return medians over the steps after a warm-up, which lasts until the density is found if it sets itself."""
    figures = [step() for _ in range(max(warm_up, AT_REST) if searches else warm_up)]
    while searches and len({each.get("density") for each in figures[-AT_REST:]}) > 1:
        figures.append(step())
    timed = [step() for _ in range(steps)]
    # Floats all: allgather_object names its tensors by the object's type.
    found = {name: float(statistics.median(each[name] for each in timed)) for name in timed[-1]}
    if searches:
        found["found_after"] = float(len(figures) - AT_REST)
    return found


if __name__ == "__main__":
    launch.run_rank(measure)
