"""Handwritten digits with a convolutional network in PyTorch, data-parallel with Horovod, by any scheme.

    horovodrun -np 4 -H localhost:4 python -m benchmarks.accuracy.pytorch_digits --compression oktopk
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.accuracy.pytorch_ranks import run
from benchmarks.accuracy.pytorch_training import Ranks, Setup, make_pytorch_parser
from benchmarks.data.digits import split_digits


class Digits:
    """The images in random order, anew in every epoch."""

    metric = "accuracy"

    def __init__(self, seed: int, batch_size: int, ranks: Ranks) -> None:
        rank, size = ranks.rank(), ranks.size()
        train_x, test_x, train_y, test_y = map(torch.as_tensor, split_digits(seed, (1, 8, 8)))
        self._test_x, self._test_y = test_x[rank::size], test_y[rank::size]
        training = TensorDataset(train_x, train_y)
        self._sampler: Any = DistributedSampler(training, num_replicas=size, rank=rank, seed=seed)
        self._loader: Any = DataLoader(training, batch_size=batch_size, sampler=self._sampler,
                                       generator=torch.Generator())

    def batches(self, epoch: int) -> Collection[Any]:
        self._sampler.set_epoch(epoch)
        return self._loader

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> tuple[float, int]:
        """Return the number of right answers, and of all."""
        return float((model(self._test_x).argmax(1) == self._test_y).sum()), len(self._test_y)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))


def make(ranks: Ranks, arguments: argparse.Namespace) -> Setup:
    return Setup(Digits(arguments.seed, arguments.batch_size, ranks), make_model(),
                 lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs))


def main(line: list[str] | None = None) -> None:
    run(make, "test accuracy {accuracy:.2%}", make_pytorch_parser(__doc__, epochs=30, batch_size=32, lr=0.0125), line)


if __name__ == "__main__":
    main()
