"""Gradients to measure with: recorded from training, or synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Gradient = NDArray[np.float32]


class Source(Protocol):
    """Source of gradients."""

    def fill(self, gradient: Gradient) -> None:
        """Write the next gradient."""


class Gradients:
    """A direction that turns slowly, plus noise, with layers of different scale: gradients that evolve.

    Both parts are drawn once and shifted along, as drawing n normal numbers costs more than the step does; beyond
    PERIOD elements they repeat themselves, as eight ranks on one machine would not have the memory.
    noise_seed: a rank's own, where ranks share the direction.
    """

    PERIOD = 1 << 24
    SCALES = np.geomspace(2.0, 0.5, 16, dtype=np.float32)

    def __init__(self, n: int, seed: int, noise_seed: int | None = None) -> None:
        period = min(n, self.PERIOD)
        self._random = np.random.default_rng(seed)
        self._direction = self._random.standard_normal(period, dtype=np.float32)
        own = self._random if noise_seed is None else np.random.default_rng(noise_seed)
        self._noise = own.standard_normal(period, dtype=np.float32)

    def fill(self, gradient: Gradient) -> None:
        """Write the next gradient."""
        period = len(self._noise)
        turn = self._random.integers(period)
        start = self._random.integers(period - period // 50)
        self._direction[start:start + period // 50] *= -0.9
        for offset in range(0, len(gradient), period):
            piece = gradient[offset:offset + period]
            before, after = piece[:turn], piece[turn:]
            np.multiply(self._noise[period - turn:][:len(before)], 2.0, out=before)
            np.multiply(self._noise[:len(after)], 2.0, out=after)
            piece += self._direction[:len(piece)]
        layer = -(-len(gradient) // len(self.SCALES))
        for index, scale in enumerate(self.SCALES):
            gradient[index * layer:(index + 1) * layer] *= scale


class Recorded:
    """Gradients that `python -m benchmarks.data.models` wrote: bfloat16 as uint16, shape (count, n).

    rank: every rank begins at another one of them.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._gradients = np.load(path, mmap_mode="r")
        self._next = rank
        self.n = self._gradients.shape[1]

    def fill(self, gradient: Gradient) -> None:
        """Write the next gradient."""
        bits = gradient.view(np.uint32)
        bits[:] = self._gradients[self._next % len(self._gradients)]
        bits <<= 16
        self._next += 5  # coprime to 16: all are met, and neighbours do not follow each other
