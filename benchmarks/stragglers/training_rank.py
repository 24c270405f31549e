"""One rank of training.py: a whole training of one task, in which the rank is late as the task says."""

from __future__ import annotations

import statistics
import time
from typing import Any

import horovod.torch as hvd
import torch

import horovod_oktopk.torch as plugin
from benchmarks import launch
from benchmarks.stragglers.tasks import TASKS, Task


def compression_of(method: str, density: float) -> Any:
    partial, dense, sparse = plugin.Partial, plugin.Dense(), plugin.OkTopk(density=density)
    return {"synchronous": dense, "oktopk": sparse, "solo": partial(dense, policy="solo"),
            "majority": partial(dense, policy="majority"), "both": partial(sparse, policy="majority"),
            "solo-oktopk": partial(sparse, policy="solo")}[method]


class Training:
    """A model that all ranks train."""

    def __init__(self, task: Task, seed: int, compression: Any) -> None:
        torch.manual_seed(seed)
        self.task, self.model = task, task.model()
        self.optimizer: Any = hvd.DistributedOptimizer(
            task.optimizer(self.model), named_parameters=self.model.named_parameters(), compression=compression)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.partial = isinstance(compression, plugin.Partial)
        self.steps = 0
        self.reports: list[Any] = []
        """Of every step, where rounds are partial."""
        self._compute = 0.0

    def run(self, epoch: int) -> None:
        for batch, device in self.task.steps(epoch):
            time.sleep(max(0.0, device - self._compute))  # before the first gradient is ready
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            self.task.loss(self.model, batch).backward()
            self._compute = min(device, time.perf_counter() - begin)
            self.optimizer.step()
            self.steps += 1
            if self.partial:
                self.reports.append(plugin.step_report(self.optimizer))


def measure(task: str, method: str, seed: int, scale: float, density: float) -> dict[str, Any]:
    """What was reached after so many seconds, without those of the evaluations; and how fast the steps were."""
    hvd.init()
    torch.set_num_threads(1)
    training = Training(TASKS[task](hvd.rank(), hvd.size(), seed, scale), seed, compression_of(method, density))
    every, history, seconds = training.task.evaluated, [], 0.0
    for epoch in range(training.task.epochs):
        if epoch % every == 0:
            hvd.barrier()
            start = time.perf_counter()
        training.run(epoch)
        if (epoch + 1) % every == 0:
            plugin.synchronize_replicas(training.optimizer)
            seconds += time.perf_counter() - start
            value = training.task.evaluate(training.model) if hvd.rank() == 0 else 0.0
            history.append({"epoch": epoch + 1, "seconds": seconds, "value": value})
    return {"history": history, "steps": training.steps, "throughput": training.steps / seconds,
            **rounds_of(training)}


def rounds_of(training: Training) -> dict[str, float]:
    """How many rounds this rank saw, and the mean number of active ranks; a synchronous step is a round of all."""
    reports = training.reports
    active = [sum(report.active) for report in reports if report.rounds]
    return {"active": statistics.fmean(active) if active else hvd.size(),
            "rounds": sum(report.rounds for report in reports) if reports else training.steps,
            "seconds_saved": sum(report.seconds_saved for report in reports)}


if __name__ == "__main__":
    launch.run_rank(measure)
