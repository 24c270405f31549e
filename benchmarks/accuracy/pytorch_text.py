"""A character-level language model in PyTorch, data-parallel with Horovod, by any scheme.

    horovodrun -np 2 -H localhost:2 python -m benchmarks.accuracy.pytorch_text --compression oktopk
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.accuracy.pytorch_ranks import run
from benchmarks.accuracy.pytorch_training import Ranks, Schedule, Setup, make_pytorch_parser
from benchmarks.data.characters import CharacterModel, load_characters, sequences
from benchmarks.data.models import GPT, Transformer

VALIDATION_SHARE = 0.1


class Text:
    """Sequences of characters in random order, anew in every epoch; the last topics are for validation."""

    metric = "validation_loss"

    def __init__(self, seed: int, batch_size: int, length: int, ranks: Ranks) -> None:
        text, self.characters = load_characters()
        split = int(len(text) * (1 - VALIDATION_SHARE))
        self._training, self._validation = sequences(text[:split], length), sequences(text[split:], length)
        self._seed, self._batch_size, self._rank, self._size = seed, batch_size, ranks.rank(), ranks.size()

    def batches(self, epoch: int) -> list[torch.Tensor]:
        # All ranks draw the same order, and each takes its own part of it.
        random = torch.Generator().manual_seed(1000 * self._seed + epoch)
        order = torch.randperm(len(self._training), generator=random)
        count = len(order) // (self._batch_size * self._size)
        mine = order[self._rank::self._size][:count * self._batch_size]
        return [self._training[part] for part in mine.split(self._batch_size)]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> tuple[float, int]:
        """Return the sum of nats, and the number of characters."""
        mine = self._validation[self._rank::self._size]
        return sum(float(self.loss(model, batch)) * len(batch) for batch in mine.split(64)), len(mine)


def make(ranks: Ranks, arguments: argparse.Namespace) -> Setup:
    task = Text(arguments.seed, arguments.batch_size, arguments.sequence, ranks)
    models: dict[str, Callable[[], nn.Module]] = {
        "lstm": lambda: CharacterModel(task.characters, arguments.hidden),
        "transformer": lambda: Transformer(arguments.hidden, arguments.sequence, layers=2),
        "gpt": lambda: GPT(task.characters, arguments.sequence, arguments.hidden)}
    steps = arguments.epochs * len(task.batches(0))

    def schedule(optimizer: torch.optim.Optimizer) -> Schedule:
        if arguments.model == "gpt":
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, steps))
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr * ranks.size(), steps, pct_start=0.1,
                                                   cycle_momentum=False, final_div_factor=1e3)

    return Setup(task, models[arguments.model](), schedule, by_step=True)


def warm_up_and_cosine(step: int, steps: int, warm_up: int = 100, least: float = 0.1) -> float:
    """Return the factor of the learning rate: it rises to 1 in the first steps, then falls to `least`."""
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return least + (1 - least) / 2 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


def make_text_parser() -> argparse.ArgumentParser:
    parser = make_pytorch_parser(__doc__, epochs=6, batch_size=16, lr=0.5)
    parser.add_argument("--model", choices=["lstm", "transformer", "gpt"], default="lstm",
                        help="gpt has a schedule of its own: a warm-up of 100 steps, and a cosine to a tenth")
    parser.add_argument("--sequence", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--hidden", type=int, default=128, help="width; of transformer a multiple of 6, of gpt of 4")
    parser.add_argument("--passes", type=int, default=1,
                        help="backward passes of a step, each of a part of the batch; an exchange of StepAhead is "
                             "applied after half of them")
    return parser


def main(line: list[str] | None = None) -> None:
    run(make, "validation loss {validation_loss:.4f} nats per character", make_text_parser(), line)


if __name__ == "__main__":
    main()
