"""Gradients that are hard for the algorithm, and the hypothesis strategy that draws from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    kind: str
    n: int
    k: int
    size: int
    steps: int
    seed: int
    dtype: str = "float32"

    def gradients(self) -> np.ndarray:
        """Return gradients of shape (steps, P, n)."""
        rng = np.random.default_rng(self.seed)
        drawn = KINDS[self.kind](rng, self)
        silent = rng.random(self.size) < (0.3 if self.kind == "silent_ranks" else 0)
        drawn[:, silent] = 0
        return drawn.astype(self.dtype)


def _normal(rng, case):
    return rng.standard_normal((case.steps, case.size, case.n))


def _ties(rng, case):
    return rng.integers(-3, 4, (case.steps, case.size, case.n)).astype(float)


def _sparse(rng, case):
    return _ties(rng, case) * (rng.random((case.steps, case.size, case.n)) < 0.1)


def _growing(rng, case):
    """Draw magnitudes that change by orders over the steps, so that reused thresholds are wrong at once."""
    return _normal(rng, case) * 10.0 ** rng.integers(-3, 4, case.steps)[:, None, None]


def _one_region(rng, case):
    """Draw all ranks' top-k at the same few places."""
    drawn = 0.01 * _normal(rng, case)
    start = int(rng.integers(0, case.n))
    drawn[:, :, start:start + case.k] += 5 + _normal(rng, case)[:, :, start:start + case.k]
    return drawn


def _cluster_per_rank(rng, case):
    """Draw rank i's top-k in the i-th part: averaged cuts would make one region hold nearly all."""
    drawn = 0.01 * _normal(rng, case)
    for rank in range(case.size):
        start = rank * case.n // case.size
        drawn[:, rank, start:start + case.k] *= 1000
    return drawn


def _one_owner(rng, case):
    """Draw local top-k spread evenly, but the large global values all in the last part."""
    drawn = _normal(rng, case)
    drawn[:, :, case.n - case.n // max(case.size, 4):] *= 10
    drawn[:, :, case.n - case.n // max(case.size, 4):] += 50
    return drawn


def _steady(rng, case):
    """Draw the same large places at every step, so that the residual stays small and thresholds stay good."""
    drawn = 0.001 * _normal(rng, case)
    places = rng.choice(case.n, min(case.k, case.n), replace=False)
    drawn[:, :, places] = rng.uniform(5, 15, (case.steps, case.size, len(places)))
    return drawn


def _moving(rng, case):
    """Draw a cluster that wanders, so that boundaries of earlier steps are off balance."""
    drawn = 0.01 * _normal(rng, case)
    for step in range(case.steps):
        at = (np.arange(case.k) + step * max(1, case.n // 7)) % case.n
        drawn[step][:, at] += 3 + rng.standard_normal((case.size, case.k))
    return drawn


KINDS = {"normal": _normal, "ties": _ties, "sparse": _sparse, "silent_ranks": _ties, "growing": _growing,
         "one_region": _one_region, "cluster_per_rank": _cluster_per_rank, "one_owner": _one_owner,
         "steady": _steady, "moving": _moving}


@st.composite
def cases(draw, dtypes=("float32", "float64"), steps=10, largest=120):
    n = draw(st.integers(1, largest))
    k = draw(st.one_of(st.integers(1, n + 2), st.integers(1, max(1, n // 8))))
    return Case(draw(st.sampled_from(sorted(KINDS))), n, k, draw(st.integers(1, 9)), steps,
                draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(dtypes)))


@st.composite
def global_ks(draw, case):
    """Draw the number of elements to keep of the sum: from 1 to as many as there can be."""
    most = min(case.n, case.size * case.k)
    return draw(st.one_of(st.integers(1, most), st.just(most), st.integers(1, min(case.k, most))))


@st.composite
def cases_with_global_k(draw, **options):
    """Draw (case, elements to keep of the sum). No density selects more than n."""
    case = draw(cases(**options).filter(lambda drawn: drawn.k <= drawn.n))
    return case, draw(global_ks(case))


QUICK_KINDS = ("cluster_per_rank", "moving", "ties")
"""Kinds whose larger cases `make test` tries; hypothesis draws from all."""


def adversarial(n=4000, k=160, size=8, steps=10):
    """Return one larger case of every kind."""
    return [Case(kind, n, k, size, steps, seed=7) for kind in sorted(KINDS)]


def each_adversarial(**arguments):
    """Return the larger cases as pytest's parameters."""
    return [pytest.param(case, id=case.kind, marks=() if case.kind in QUICK_KINDS else pytest.mark.slow)
            for case in adversarial(**arguments)]
