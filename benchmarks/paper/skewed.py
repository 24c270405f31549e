"""Gradients whose top-k crowd in few places, for balancing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DENSITY = 0.01
CASES = ("three common clusters", "a cluster for each rank", "large values in one place")


def skewed_gradient(case: str, n: int, rank: int, size: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Weak noise, and k large elements in few places."""
    k = round(DENSITY * n)
    gradient = 0.01 * random.standard_normal(n, dtype=np.float32)
    if case == "three common clusters":
        indices = np.concatenate([place + random.choice(k, k // 3, replace=False)
                                  for place in (n // 10, n // 4, n // 2)])
    elif case == "a cluster for each rank":
        place = int(np.random.default_rng(size).permutation(size)[rank])  # in the lower half, and in no order
        indices = place * (n // size // 2) + random.choice(2 * k, k, replace=False)
    else:
        indices = random.choice(n, k, replace=False)
        hot = n // 3 + rank + size * np.arange(k // size)  # k elements that no two ranks share
        gradient[hot] = 5.0
    gradient[indices] += 1 + random.random(len(indices), dtype=np.float32)
    return gradient
