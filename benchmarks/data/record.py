"""Trains one of the large models, and writes gradients of it for benchmarks.cluster.compare --gradients.

    python -m benchmarks.data.record --path runs/vgg16.npy
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.data.models import WORKLOADS, Workload


def record(workload: Workload, path: Path, count: int, steps: int, batch: int, seed: int) -> None:
    """Train for some steps, and then write the gradients of `count` batches at the same parameters.

    The file holds float32 numbers without their lower 16 bits (bfloat16), uint16, shape (count, n).
    """
    torch.manual_seed(seed)
    model = workload.make()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    batches = workload.batches(batch, seed)
    n = sum(parameter.numel() for parameter in model.parameters())
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded = np.lib.format.open_memmap(path, "w+", np.uint16, (count, n))
    for step in tqdm(range(steps + count), desc=f"recording {workload.title}", unit="step"):
        optimizer.zero_grad()
        workload.loss(model, next(batches)).backward()
        if step < steps:
            optimizer.step()
        else:
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
            recorded[step - steps] = (flat.numpy().view(np.uint32) >> 16).astype(np.uint16)
    recorded.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="vgg16")
    parser.add_argument("--path", type=Path, default=Path("runs/gradients.npy"))
    parser.add_argument("--count", type=int, default=16, help="batches whose gradients are written")
    parser.add_argument("--steps", type=int, default=40, help="of training before")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    record(WORKLOADS[arguments.workload], arguments.path, arguments.count, arguments.steps, arguments.batch,
           arguments.seed)


if __name__ == "__main__":
    main()
