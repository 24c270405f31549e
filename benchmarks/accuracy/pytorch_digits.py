"""Handwritten digits with a convolutional network, data-parallel with Horovod.

    horovodrun -np 4 -H localhost:4 python -m benchmarks.accuracy.pytorch_digits --compression oktopk

The data (1,797 images of 8 x 8 pixels) come with scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from horovod_oktopk.schemes.cost import dense_volume
from horovod_oktopk.torch import (
    Dense,
    DensitySchedule,
    GaussianK,
    GTopk,
    OkTopk,
    Partial,
    TopkA,
    TopkDSA,
    step_report,
    synchronize_replicas,
)

SCHEMES = {"oktopk": OkTopk, "topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk, "gaussiank": GaussianK}
WARM_UP_STEPS = 5
"""Not timed."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", choices=["none", *SCHEMES], default="oktopk")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of the gradient that is sent")
    parser.add_argument("--density-warmup", type=int, default=0, metavar="EPOCHS",
                        help="the density falls from 25%% to --density over so many epochs")
    parser.add_argument("--partial", choices=["solo", "majority"], help="do not wait for ranks that are late")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.0125, help="per rank: it is multiplied by the number of ranks")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="rank 0 writes the results here")
    parser.add_argument("--tensorboard", type=Path, help="rank 0 writes what every step did here")
    return parser.parse_args()


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = ((images - images.mean()) / images.std()).astype(np.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))


def warmup(density: float, epochs: int) -> Callable[[int], float | None]:
    """The density falls from 25 % by the same factor in every epoch; after the last of them it is the optimizer's."""
    return lambda epoch: max(density, 0.25 * (density / 0.25) ** (epoch / epochs)) if epoch < epochs else None


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        images, labels = data.tensors
        return float((model(images).argmax(1) == labels).float().mean())


class Statistics:
    """Seconds and bytes by step, on this rank."""

    def __init__(self, model: nn.Module, writer: Any) -> None:
        self.seconds: list[float] = []
        self.bytes_sent: list[float] = []
        self._dense = 4 * dense_volume(sum(p.numel() for p in model.parameters()), hvd.size())
        self._writer = writer

    def step(self, seconds: float, optimizer: torch.optim.Optimizer, compressed: bool) -> None:
        self.seconds.append(seconds)
        report = step_report(optimizer) if compressed else None
        self.bytes_sent.append(self._dense if report is None else report.bytes_sent)
        if report is not None and self._writer is not None:
            report.write(self._writer)

    def summary(self) -> dict[str, float]:
        """Over all ranks."""
        means = hvd.allgather_object(statistics.fmean(self.bytes_sent))
        return {"bytes_per_step": statistics.fmean(means),
                "seconds_per_step": statistics.median(self.seconds[WARM_UP_STEPS:])}


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(arguments.seed)
    training, test = load_data(arguments.seed)
    # Horovod: every rank sees its own part of the data.
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank(), seed=arguments.seed)
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler)
    model = make_model()

    # Horovod: scale the learning rate by the number of ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=arguments.momentum)
    compressed = arguments.compression != "none"
    compression = SCHEMES[arguments.compression](density=arguments.density) if compressed else Dense()
    if arguments.partial is not None:
        compression = Partial(compression, policy=arguments.partial)
    # Horovod: wrap the optimizer; this is where the compression goes.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=compression)
    by_epoch = warmup(arguments.density, arguments.density_warmup)
    densities = DensitySchedule(optimizer, by_epoch) if compressed else None
    # Horovod: all ranks start from the same parameters and optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(arguments.seed * hvd.size() + hvd.rank())  # Horovod: every rank has dropout masks of its own.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)

    losses: list[float] = []  # of the last batch of every epoch, on rank 0
    history: list[dict[str, float]] = []
    seen = Statistics(model, make_writer(arguments.tensorboard))
    began = time.perf_counter()
    # Horovod: only rank 0 shows a progress bar.
    with tqdm(total=arguments.epochs * len(loader), desc=f"{arguments.compression:>9}", unit="step",
              disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for epoch in range(arguments.epochs):
            model.train()
            sampler.set_epoch(epoch)
            for images, labels in loader:
                start = time.perf_counter()
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                seen.step(time.perf_counter() - start, optimizer, compressed)
                progress.update()
            synchronize_replicas(optimizer)  # with --partial: from here on all ranks have the same parameters
            schedule.step()
            if densities is not None:
                densities.step()
            losses.append(loss.item())
            history.append({"epoch": epoch + 1, "accuracy": accuracy(model, test),
                            "seconds": time.perf_counter() - began})
            progress.set_postfix(epoch=epoch + 1, loss=f"{loss.item():.3f}")
    # Horovod: average the loss of the last batches over the ranks.
    last_loss = float(hvd.allreduce(loss.detach(), name="loss"))
    return {"compression": arguments.compression, "density": arguments.density, "ranks": hvd.size(),
            "parameters": sum(p.numel() for p in model.parameters()), "accuracy": history[-1]["accuracy"],
            "loss": last_loss, "losses": losses, "history": history,
            "bytes_are": "counted as sent" if compressed else "computed: 2n(P-1)/P words of 4 bytes",
            **seen.summary()}


def make_writer(folder: Path | None) -> Any:
    if folder is None or hvd.rank() != 0:
        return None
    from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(folder))


def main() -> None:
    arguments = parse_arguments()
    hvd.init()  # Horovod: start.
    torch.set_num_threads(1)
    results = train(arguments)
    if hvd.rank() == 0:
        print(f"test accuracy {results['accuracy']:.2%}, {results['bytes_per_step']:,.0f} bytes sent by each rank in "
              f"a step, {1e3 * results['seconds_per_step']:.1f} ms a step")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
