"""What ranks select: ascending indices, by rank, and the counts of them by region."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from horovod_oktopk.phases.regions import count_by_region


@st.composite
def selections(draw):
    """Sorted distinct indices of each rank, clustered anywhere, of any number."""
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
    """Rank i's top-k all in the i-th part."""
    rng = np.random.default_rng(0)
    return n, [rank * n // size + np.sort(rng.choice(n // size, k, replace=False)) for rank in range(size)]


def region_counts(selected, boundaries):
    """Shape (P, P): elements of rank i in region j."""
    return np.stack([count_by_region(indices, boundaries) for indices in selected])
