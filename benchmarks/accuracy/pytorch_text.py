"""A character-level language model (LSTM), data-parallel with Horovod.

    horovodrun -np 2 -H localhost:2 python -m benchmarks.accuracy.pytorch_text --compression oktopk

The text is English and comes with Python: the topics of its `help()`, about 460,000 characters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from horovod_oktopk.schemes.cost import dense_volume
from horovod_oktopk.torch import DensitySchedule, GaussianK, GTopk, OkTopk, TopkA, TopkDSA, step_report

SCHEMES = {"oktopk": OkTopk, "topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk, "gaussiank": GaussianK}
WARM_UP_STEPS = 5
"""Not timed."""
VALIDATION_SHARE = 0.1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", choices=["none", *SCHEMES], default="oktopk")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of the gradient that is sent")
    parser.add_argument("--density-warmup", type=int, default=0, metavar="EPOCHS",
                        help="the density falls from 25%% to --density over so many epochs")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.5, help="per rank: it is multiplied by the number of ranks")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="rank 0 writes the results here")
    parser.add_argument("--tensorboard", type=Path, help="rank 0 writes what every step did here")
    return parser.parse_args()


def load_text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Characters as numbers, for training and for validation, and how many different ones there are.

    The topics go in alphabetical order, the last of them to validation.
    """
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    characters = torch.tensor([numbers[character] for character in text])
    split = int(len(text) * (1 - VALIDATION_SHARE))
    return characters[:split], characters[split:], len(numbers)


def sequences(characters: torch.Tensor, length: int) -> torch.Tensor:
    """int64, shape (sequences, length + 1): the last character of one is the first of the next."""
    return characters.unfold(0, length + 1, length)


def epoch_batches(training: torch.Tensor, batch_size: int, seed: int) -> list[torch.Tensor]:
    """This rank's batches of an epoch; every rank gets as many."""
    # Horovod: all ranks draw the same order, and each takes its own part of it.
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    count = len(order) // (batch_size * hvd.size())
    mine = order[hvd.rank()::hvd.size()][:count * batch_size]
    return [training[part] for part in mine.split(batch_size)]


class CharacterModel(nn.Module):
    """Predicts each next character."""

    def __init__(self, characters: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.output = nn.Linear(hidden, characters)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Nats per character, over sequences of shape (batch, length + 1)."""
        states, _ = self.lstm(self.embedding(batch[:, :-1]))
        return functional.cross_entropy(self.output(states).flatten(0, 1), batch[:, 1:].flatten())


def warmup(density: float, epochs: int) -> Callable[[int], float | None]:
    """The density falls from 25 % by the same factor in every epoch; after the last of them it is the optimizer's."""
    return lambda epoch: max(density, 0.25 * (density / 0.25) ** (epoch / epochs)) if epoch < epochs else None


def validate(model: CharacterModel, validation: torch.Tensor) -> float:
    """Nats per character."""
    model.eval()
    # Horovod: every rank validates its own part; the mean is weighted by what each has.
    mine = validation[hvd.rank()::hvd.size()]
    with torch.no_grad():
        total = sum(float(model.loss(batch)) * len(batch) for batch in mine.split(64))
    sums = hvd.allreduce(torch.tensor([total, float(len(mine))], dtype=torch.float64), op=hvd.Sum, name="validation")
    return float(sums[0] / sums[1])


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
        # A float on every rank: Horovod names what it gathers after its type.
        means = hvd.allgather_object(statistics.fmean(self.bytes_sent))
        return {"bytes_per_step": statistics.mean(means),
                "seconds_per_step": statistics.median(self.seconds[WARM_UP_STEPS:])}


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(arguments.seed)
    training_text, validation_text, characters = load_text()
    training = sequences(training_text, arguments.sequence)
    validation = sequences(validation_text, arguments.sequence)
    model = CharacterModel(characters, arguments.hidden)

    # Horovod: scale the learning rate by the number of ranks.
    rate = arguments.lr * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=arguments.momentum)
    compressed = arguments.compression != "none"
    # Horovod: wrap the optimizer; this is where the compression goes.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        compression=SCHEMES[arguments.compression](density=arguments.density) if compressed else hvd.Compression.none)
    by_epoch = warmup(arguments.density, arguments.density_warmup)
    densities = DensitySchedule(optimizer, by_epoch) if compressed else None
    # Horovod: all ranks start from the same parameters and optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    steps = arguments.epochs * (len(training) // (arguments.batch_size * hvd.size()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1, cycle_momentum=False,
                                                   final_div_factor=1e3)
    seen = Statistics(model, make_writer(arguments.tensorboard))
    history: list[dict[str, float]] = []
    began = time.perf_counter()
    # Horovod: only rank 0 shows a progress bar.
    with tqdm(total=steps, desc=f"{arguments.compression:>9}", unit="step", disable=hvd.rank() != 0,
              mininterval=0.5) as progress:
        for epoch in range(arguments.epochs):
            model.train()
            for batch in epoch_batches(training, arguments.batch_size, 1000 * arguments.seed + epoch):
                start = time.perf_counter()
                optimizer.zero_grad()
                loss = model.loss(batch)
                loss.backward()
                optimizer.step()
                schedule.step()
                seen.step(time.perf_counter() - start, optimizer, compressed)
                progress.update()
            if densities is not None:
                densities.step()
            history.append({"epoch": epoch + 1, "validation_loss": validate(model, validation),
                            "seconds": time.perf_counter() - began})
            progress.set_postfix(epoch=epoch + 1, loss=f"{loss.item():.3f}",
                                 validation=f"{history[-1]['validation_loss']:.3f}")
    return {"compression": arguments.compression, "density": arguments.density, "ranks": hvd.size(),
            "parameters": sum(p.numel() for p in model.parameters()), "history": history,
            "validation_loss": history[-1]["validation_loss"],
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
        print(f"validation loss {results['validation_loss']:.4f} nats per character, "
              f"{results['bytes_per_step']:,.0f} bytes sent by each rank in a step, "
              f"{1e3 * results['seconds_per_step']:.1f} ms a step")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
