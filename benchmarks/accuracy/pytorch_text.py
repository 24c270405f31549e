"""A character-level language model (LSTM) in PyTorch, data-parallel with Horovod, by any scheme.

    horovodrun -np 2 -H localhost:2 python -m benchmarks.accuracy.pytorch_text --compression oktopk
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch

from benchmarks.accuracy.pytorch_training import distribute, make_pytorch_parser, train
from benchmarks.accuracy.training import finish
from benchmarks.data.characters import CharacterModel, load_characters, sequences

VALIDATION_SHARE = 0.1


class Text:
    """Sequences of characters in random order, anew in every epoch; the last topics are for validation."""

    metric = "validation_loss"

    def __init__(self, seed: int, batch_size: int, length: int) -> None:
        text, self.characters = load_characters()
        split = int(len(text) * (1 - VALIDATION_SHARE))
        self._training, self._validation = sequences(text[:split], length), sequences(text[split:], length)
        self._seed, self._batch_size = seed, batch_size

    def batches(self, epoch: int) -> list[torch.Tensor]:
        # All ranks draw the same order, and each takes its own part of it.
        random = torch.Generator().manual_seed(1000 * self._seed + epoch)
        order = torch.randperm(len(self._training), generator=random)
        count = len(order) // (self._batch_size * hvd.size())
        mine = order[hvd.rank()::hvd.size()][:count * self._batch_size]
        return [self._training[part] for part in mine.split(self._batch_size)]

    def loss(self, model: CharacterModel, batch: torch.Tensor) -> torch.Tensor:
        return model.loss(batch)

    def evaluate(self, model: CharacterModel) -> float:
        """Nats per character; every rank validates its own part, and the mean is weighted by what each has."""
        mine = self._validation[hvd.rank()::hvd.size()]
        total = sum(float(model.loss(batch)) * len(batch) for batch in mine.split(64))
        sums = hvd.allreduce(torch.tensor([total, float(len(mine))], dtype=torch.float64), op=hvd.Sum,
                             name="validation")
        return float(sums[0] / sums[1])


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = make_pytorch_parser(__doc__, epochs=6, batch_size=16, lr=0.5)
    parser.add_argument("--sequence", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--hidden", type=int, default=128)
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    task = Text(arguments.seed, arguments.batch_size, arguments.sequence)
    model = CharacterModel(task.characters, arguments.hidden)
    optimizer = distribute(model, arguments)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.lr * hvd.size(), arguments.epochs * len(task.batches(0)), pct_start=0.1,
        cycle_momentum=False, final_div_factor=1e3)
    results = train(task, model, optimizer, schedule, True, arguments)
    if hvd.rank() == 0:
        finish(results, f"validation loss {results['validation_loss']:.4f} nats per character", arguments.json)


if __name__ == "__main__":
    main()
