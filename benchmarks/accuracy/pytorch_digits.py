"""Handwritten digits with a convolutional network in PyTorch, data-parallel with Horovod, by any scheme.

    horovodrun -np 4 -H localhost:4 python -m benchmarks.accuracy.pytorch_digits --compression oktopk
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.accuracy.pytorch_training import distribute, make_pytorch_parser, train
from benchmarks.accuracy.training import finish
from benchmarks.data.digits import split_digits


class Digits:
    """The images in random order, anew in every epoch."""

    metric = "accuracy"

    def __init__(self, seed: int, batch_size: int) -> None:
        train_x, self._test_x, train_y, self._test_y = map(torch.as_tensor, split_digits(seed, (1, 8, 8)))
        training = TensorDataset(train_x, train_y)
        self._sampler: Any = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank(), seed=seed)
        self._loader: Any = DataLoader(training, batch_size=batch_size, sampler=self._sampler)

    def batches(self, epoch: int) -> Collection[Any]:
        self._sampler.set_epoch(epoch)
        return self._loader

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        return float((model(self._test_x).argmax(1) == self._test_y).float().mean())


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    return make_pytorch_parser(__doc__, epochs=30, batch_size=32, lr=0.0125).parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    task, model = Digits(arguments.seed, arguments.batch_size), make_model()
    optimizer = distribute(model, arguments)
    torch.manual_seed(arguments.seed * hvd.size() + hvd.rank())  # every rank has dropout masks of its own
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    results = train(task, model, optimizer, schedule, False, arguments)
    if hvd.rank() == 0:
        finish(results, f"test accuracy {results['accuracy']:.2%}", arguments.json)


if __name__ == "__main__":
    main()
