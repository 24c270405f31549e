"""One rank of stragglers.py: trains with each seed, late as the skew says."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional

import horovod_oktopk.torch as plugin
from benchmarks import launch
from benchmarks.data.digits import split_digits

BATCH, RATE = 16, 0.2


def measure(policy: Any, scheme: str, seeds: list[int], steps: int, skew: float,
            density: float) -> list[dict[str, float]]:
    """Return what a method reaches with each seed. skew: seconds between two ranks, and of the base."""
    hvd.init()
    torch.set_num_threads(1)
    options = plugin.Dense() if scheme == "Dense" else plugin.OkTopk(density=density)
    compression = options if policy == "synchronous" else plugin.Partial(options, policy=policy)
    return [train(compression, seed, steps, skew) for seed in seeds]


def train(compression: Any, seed: int, steps: int, skew: float) -> dict[str, float]:
    """Train a new model; return test loss and accuracy, and steps a second."""
    torch.manual_seed(seed)
    images, test_images, labels, test_labels = map(torch.as_tensor, split_digits(seed, (64,)))
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE), model.named_parameters(),
                                              compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()
    start, taken, generator = time.perf_counter(), 0.0, torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for step in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        late = skew * (2 + (hvd.rank() + step) % hvd.size())
        time.sleep(max(0.0, late - taken))  # the computation is a part of it
        begin = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        taken = time.perf_counter() - begin
        optimizer.step()
    plugin.synchronize_replicas(optimizer)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        outputs = model(test_images)
    return {"loss": float(functional.cross_entropy(outputs, test_labels)),
            "accuracy": float((outputs.argmax(1) == test_labels).float().mean()),
            "steps_per_second": steps / seconds}


if __name__ == "__main__":
    launch.run_rank(measure)
