"""Selections of ranks: ascending indices, by rank, and the counts of them by region."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from horovod_oktopk.phases.regions import count_by_region


@st.composite
def selections(draw):
    """Draw sorted distinct indices of each rank, clustered anywhere, of any number."""
    n, size = draw(st.integers(1, 3000)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    selected = []
    for _ in range(size):
        width = int(rng.integers(1, n + 1))
        start = int(rng.integers(0, n - width + 1))
        count = int(rng.integers(0, min(width, 300) + 1))
        selected.append(np.sort(start + rng.choice(width, count, replace=False)))
    return n, selected


def clustered(size=8, k=400, n=80_000):
    """Return selections in which rank i's top-k is all in the i-th part."""
    rng = np.random.default_rng(0)
    return n, [rank * n // size + np.sort(rng.choice(n // size, k, replace=False)) for rank in range(size)]


def region_counts(selected, boundaries):
    """Return the elements of rank i in region j. Shape (P, P)."""
    return np.stack([count_by_region(indices, boundaries) for indices in selected])
