"""The large models that the benchmarks train, on real data that comes with Python packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.data.characters import load_text

Batch = tuple[torch.Tensor, torch.Tensor]
VGG_16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")


SGD: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Workload:
    """make: a new model. batches: endless batches of a size, drawn by a seed. batch: samples of a rank's step."""

    title: str
    make: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    batch: int
    optimizer: Callable[..., torch.optim.Optimizer] = SGD

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def vgg16() -> nn.Module:
    """Return VGG-16 for images of 32 x 32, with batch normalisation: 14,728,266 parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG_16:
        if isinstance(width, int):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


class LSTM(nn.Module):
    """A character model of two layers: about 27.6 million parameters, as the LSTM of the paper."""

    def __init__(self, hidden: int = 1500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.lstm = nn.LSTM(64, hidden, num_layers=2, batch_first=True)
        self.output = nn.Linear(hidden, 128)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.embedding(characters))[0])


class Transformer(nn.Module):
    """A character model with causal attention; as it stands, of about 10.8 million parameters."""

    def __init__(self, width: int = 384, length: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(128, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, 128)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        length = characters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.output(self.layers(self.embedding(characters) + self.position[:length], mask, is_causal=True))


class Block(nn.Module):
    """A layer of GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.before_attention(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        heads = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True)
        x = x + self.projection(heads.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.before_mlp(x))))


class GPT(nn.Module):
    """A character model in a published configuration for CPUs, of about 0.8 million parameters.

    It has 4 layers, 128 wide, without biases and dropout; embedding and output share a matrix.
    """

    def __init__(self, characters: int, length: int = 64, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                deep = "projection" in name or "narrow" in name
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(characters) + self.position.weight[:characters.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.last(x), self.embedding.weight)


def digits(size: int, seed: int) -> Iterator[Batch]:
    """Yield handwritten digits (8 x 8, from scikit-learn), enlarged to 32 x 32 in three equal channels."""
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets, random = torch.tensor(labels), torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(small), (size,), generator=random)
        yield functional.interpolate(small[chosen], size=32, mode="bilinear").expand(-1, 3, -1, -1), targets[chosen]


def text(length: int) -> Callable[[int, int], Iterator[Batch]]:
    """Return a source of sequences of the topics of Python's help(), each with the characters that follow."""
    def batches(size: int, seed: int) -> Iterator[Batch]:
        codes = load_text().encode("ascii", "replace")
        characters = torch.tensor(np.frombuffer(codes, np.uint8).astype(np.int64))
        random = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(characters) - length - 1, (size, 1), generator=random)
            chosen = characters[starts + torch.arange(length + 1)]
            yield chosen[:, :-1], chosen[:, 1:]

    return batches


WORKLOADS = {"vgg16": Workload("VGG-16 on digits", vgg16, digits, 2),
             "lstm": Workload("LSTM on text", LSTM, text(16), 1),
             "transformer": Workload("Transformer on text", Transformer, text(64), 1),
             "gpt": Workload("GPT on text", lambda: GPT(128), text(64), 3, ADAMW),
             "gpt-wide": Workload("GPT, 288 wide, on text", lambda: GPT(128, width=288), text(64), 2, ADAMW)}
