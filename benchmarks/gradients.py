"""Gradients to measure with: recorded from training, or synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Gradient = NDArray[np.float32]


class Source(Protocol):
    """Where gradients come from."""

    def fill(self, gradient: Gradient) -> None:
        """Writes the next gradient."""


class Gradients:
    """A direction that turns slowly, plus noise, with layers of different scale: gradients that evolve.

    Both parts are drawn once and shifted along, as drawing n normal numbers costs more than the step does.
    noise_seed: a rank's own, where ranks share the direction.
    """

    def __init__(self, n: int, seed: int, noise_seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)
        self._direction = self._random.standard_normal(n, dtype=np.float32)
        own = self._random if noise_seed is None else np.random.default_rng(noise_seed)
        self._noise = own.standard_normal(n, dtype=np.float32)
        scales = np.geomspace(2.0, 0.5, 16, dtype=np.float32)
        self._scale = np.repeat(scales, -(-n // 16))[:n]

    def fill(self, gradient: Gradient) -> None:
        """Writes the next gradient."""
        n = len(gradient)
        turn = self._random.integers(n)
        start = self._random.integers(n - n // 50)
        self._direction[start:start + n // 50] *= -0.9
        np.multiply(self._noise[:n - turn], 2.0, out=gradient[turn:])
        np.multiply(self._noise[n - turn:], 2.0, out=gradient[:turn])
        gradient += self._direction
        gradient *= self._scale


class Recorded:
    """Gradients that `python benchmarks/models.py` wrote: bfloat16 as uint16, shape (count, n).

    rank: every rank begins at another one of them.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._gradients = np.load(path, mmap_mode="r")
        self._next = rank
        self.n = self._gradients.shape[1]

    def fill(self, gradient: Gradient) -> None:
        """Writes the next gradient."""
        bits = gradient.view(np.uint32)
        bits[:] = self._gradients[self._next % len(self._gradients)]
        bits <<= 16
        self._next += 5  # coprime to 16: all are met, and neighbours do not follow each other
