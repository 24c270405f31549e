"""Tasks whose ranks take unequally long for a step: what training.py trains.

Eight ranks on a few cores cannot compute at the same time as eight devices would. So a rank sleeps, and then computes
the step's gradient for real, for as long together as the task says that the rank's *device* takes.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.data.digits import split_digits

Batch = tuple[torch.Tensor, torch.Tensor]


class Task(Protocol):
    """One rank's share; made with (rank, size, seed, scale), where scale multiplies the differences between ranks.

    epochs: in all; the model is evaluated after every `evaluated` of them.
    """

    title: str
    metric: str
    epochs: int
    evaluated: int

    def model(self) -> nn.Module: ...

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    def steps(self, epoch: int) -> Iterator[tuple[Batch, float]]:
        """This rank's batches, and the seconds that each takes."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor: ...

    def evaluate(self, model: nn.Module) -> float: ...


class Hyperplane:
    """y = a · x + noise in 8192 dimensions; one rank, drawn anew at every step, is late (Figure 10).

    The paper's delays of 200, 300 and 400 ms are scales of 0.5, 0.75 and 1 here: as much of a step.
    """

    title, metric = "Hyperplane regression", "validation loss"
    epochs, evaluated = 16, 4
    base, delay = 0.100, 0.100
    dimensions, samples, batch = 8192, 32_768, 2048

    def __init__(self, rank: int, size: int, seed: int, scale: float) -> None:
        self.rank, self.size, self.late = rank, size, self.delay * scale
        coefficients = torch.randn(self.dimensions, 1, generator=torch.Generator().manual_seed(seed))
        draws = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
        self.x = torch.randn(self.samples // size, self.dimensions, generator=draws)
        self.y = self.x @ coefficients + torch.randn(len(self.x), 1, generator=draws)
        self.test_x = torch.randn(2048, self.dimensions, generator=draws)
        self.test_y = self.test_x @ coefficients
        self.victims = np.random.default_rng(seed)

    def model(self) -> nn.Module:
        return nn.Linear(self.dimensions, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1 * self.batch / self.dimensions)

    def steps(self, epoch: int) -> Iterator[tuple[Batch, float]]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        for part in order.split(self.batch // self.size):
            late = self.victims.integers(self.size) == self.rank
            yield (self.x[part], self.y[part]), self.base + self.late * bool(late)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        """Mean squared error beside the noise."""
        with torch.no_grad():
            return float(functional.mse_loss(model(self.test_x), self.test_y))


class Digits:
    """Handwritten digits; all ranks are skewed, and change places after every step (Figure 12)."""

    title, metric = "Handwritten digits, all ranks skewed", "test accuracy"
    epochs, evaluated = 16, 8
    base, skew = 0.100, 0.050
    batch = 16

    def __init__(self, rank: int, size: int, seed: int, scale: float) -> None:
        self.rank, self.size, self.seed, self.apart = rank, size, seed, self.skew * scale
        self.x, self.test_x, self.y, self.test_y = map(torch.as_tensor, split_digits(seed, (1, 8, 8)))

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def steps(self, epoch: int) -> Iterator[tuple[Batch, float]]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        mine = order[self.rank::self.size][:len(order) // self.size]
        for step, part in enumerate(mine.split(self.batch)):
            place = (self.rank + epoch + step) % self.size
            yield (self.x[part], self.y[part]), self.base + self.apart * (1 + place)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


class WideDigits(Digits):
    """The same images, a perceptron of 1,126,410 parameters: for a network that has a limit."""

    title = "Handwritten digits, a wide perceptron, all ranks skewed"
    epochs, evaluated = 24, 3
    base, skew = 0.040, 0.020

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                             nn.Linear(1024, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.2)


class Docstrings:
    """Which library a docstring is from, by an LSTM over its words (Figure 13).

    A step takes as long as its texts are. Batches are made of texts of about the same length, as is usual.
    """

    title, metric = "Docstrings of very different lengths, LSTM", "test accuracy"
    epochs, evaluated = 6, 1
    base, per_word = 0.020, 0.0015
    batch, longest, per_class, vocabulary = 16, 100, 1500, 4000
    libraries = ("numpy", "torch", "sklearn", "matplotlib")

    def __init__(self, rank: int, size: int, seed: int, scale: float) -> None:
        self.rank, self.size, self.seed, self.seconds = rank, size, seed, self.per_word * scale
        texts = [(words, label) for label, library in enumerate(self.libraries)
                 for words in docstrings(library, self.per_class)]
        order = np.random.default_rng(seed).permutation(len(texts))
        texts = [texts[index] for index in order]
        known = Counter(word for words, _ in texts for word in words).most_common(self.vocabulary - 1)
        number = {word: 1 + index for index, (word, _) in enumerate(known)}
        coded = [([number.get(word, 0) for word in words[:self.longest]], label) for words, label in texts]
        self.test, self.training = coded[:800], coded[800:]

    def model(self) -> nn.Module:
        return Classifier(self.vocabulary, len(self.libraries))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.005)

    def steps(self, epoch: int) -> Iterator[tuple[Batch, float]]:
        random = np.random.default_rng((self.seed, epoch))
        lengths = [len(words) for words, _ in self.training]
        order = sorted(random.permutation(len(self.training)).tolist(), key=lengths.__getitem__)
        batches = [order[first:first + self.batch] for first in range(0, len(order) - self.batch + 1, self.batch)]
        random.shuffle(batches)
        for members in batches[:len(batches) // self.size * self.size][self.rank::self.size]:
            batch = padded([self.training[index] for index in members])
            yield batch, self.base + self.seconds * batch[0].shape[1]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            parts = [padded(self.test[first:first + 100]) for first in range(0, len(self.test), 100)]
            return float(torch.cat([model(x).argmax(1) == y for x, y in parts]).float().mean())


class Classifier(nn.Module):
    """Word embeddings, an LSTM, and the mean of what it says at every word."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words + 1, 32, padding_idx=words)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        there = words.ne(self.embedding.num_embeddings - 1).unsqueeze(2)  # the last is padding
        hidden, _ = self.lstm(self.embedding(words))
        return self.out((hidden * there).sum(1) / there.sum(1))


def padded(texts: list[tuple[list[int], int]]) -> Batch:
    longest = max(len(words) for words, _ in texts)
    rows = [words + [Docstrings.vocabulary] * (longest - len(words)) for words, _ in texts]
    return torch.tensor(rows), torch.tensor([label for _, label in texts])


def docstrings(library: str, wanted: int) -> list[list[str]]:
    """The words of so many of a library's docstrings, all different, without its own name; read from its source."""
    paths = sorted(Path(sysconfig.get_paths()["purelib"], library).rglob("*.py"))
    np.random.default_rng(0).shuffle(paths)  # type: ignore[arg-type]
    found: dict[str, list[str]] = {}
    for path in paths:
        for text in re.findall(r':\s*\n\s*r?"""(.+?)"""', path.read_text(encoding="utf-8"), re.DOTALL):
            words = [word for word in re.findall(r"[a-z]+|[^\sa-z]", text.lower()) if word != library]
            if len(words) >= 3:
                found[text] = words
        if len(found) >= wanted:
            break
    return list(found.values())[:wanted]


TASKS: dict[str, Any] = {"hyperplane": Hyperplane, "digits": Digits, "wide": WideDigits, "docstrings": Docstrings}
