"""English text that comes with Python, the topics of its `help()` (about 460,000 characters), and a model of it."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn


def load_text() -> str:
    """Return the topics in alphabetical order."""
    return "\n".join(topics[name] for name in sorted(topics))


def load_characters() -> tuple[torch.Tensor, int]:
    """Return the text as numbers, int64, and the number of different characters."""
    text = load_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def sequences(characters: torch.Tensor, length: int) -> torch.Tensor:
    """Return int64, shape (sequences, length + 1): the last character of a sequence is the next one's first."""
    return characters.unfold(0, length + 1, length)


class CharacterModel(nn.Module):
    """Predicts each next character."""

    def __init__(self, characters: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.output = nn.Linear(hidden, characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next character."""
        logits: torch.Tensor = self.output(self.lstm(self.embedding(characters))[0])
        return logits
