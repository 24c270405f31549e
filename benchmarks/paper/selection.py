"""What is selected in a step: by OkTopk, by the paper's reused thresholds, by Gaussiank; ξ, and the fill-in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.data_parallel import Gradients, Outcome
from horovod_oktopk.schemes.gaussiank import gaussian_threshold
from horovod_oktopk.selection.local_top_k import kth_magnitude, top_k
from horovod_oktopk.vectors.sparse import SparseVector, sum_of

THRESHOLD_INTERVAL = 32
"""τ′ of the paper, and the package's default."""


class PlainReuse:
    """The paper's selection: local and global thresholds are evaluated every τ′ steps, and reused unguarded.

    own_residual: it keeps residuals as if it had made the updates; otherwise it selects from the acc it is given.
    """

    def __init__(self, size: int, n: int, k: int, own_residual: bool) -> None:
        self._k = k
        self._residuals = [np.zeros(n, np.float32) for _ in range(size)] if own_residual else None
        self._local = [0.0] * size
        self._global = 0.0

    def step(self, t: int, accumulated: Gradients, gradients: Gradients) -> tuple[float, int]:
        """Elements selected: locally (mean over ranks), and globally. t counts from 1."""
        due = (t - 1) % THRESHOLD_INTERVAL == 0
        if self._residuals is not None:
            accumulated = [r + gradient for r, gradient in zip(self._residuals, gradients, strict=True)]
        if due:
            self._local = [kth_magnitude(acc, self._k) for acc in accumulated]
        selections = [passing(acc, threshold) for acc, threshold in zip(accumulated, self._local, strict=True)]
        total = sum_of(selections)
        if due:
            self._global = kth_magnitude(total.values, self._k)
        update = total.compress(np.abs(total.values) >= np.float32(self._global))
        if self._residuals is not None:
            for acc, selection in zip(accumulated, selections, strict=True):
                acc[selection.indices[selection.positions_in(update)]] = 0
            self._residuals = accumulated
        return float(np.mean([len(selection) for selection in selections])), len(update)


def passing(acc: NDArray[np.float32], threshold: float) -> SparseVector:
    indices = np.flatnonzero(np.abs(acc) >= np.float32(threshold))
    return SparseVector(indices, acc[indices])


def dense_top_k(vector: NDArray[np.float32], k: int) -> SparseVector:
    return top_k(passing(vector, kth_magnitude(vector, k)), k)


def xi(accumulated: Gradients, gradients: Gradients, outcomes: Sequence[Outcome], k: int) -> dict[str, float]:
    """The least ξ with which Equation 5 holds in this step; the factors 1/P and the learning rate cancel.

    exact: with exact top-k throughout, as the equation is written. applied: with the update that was applied.
    """
    wanted = dense_top_k(np.sum(accumulated, axis=0), k)
    exact = top_k(sum_of([outcome.selection for outcome in outcomes]), k)
    norm = float(np.linalg.norm(np.sum(gradients, axis=0)))
    return {"exact": distance(wanted, exact, len(gradients[0])) / norm,
            "applied": distance(wanted, outcomes[0].update, len(gradients[0])) / norm}


def distance(one: SparseVector, other: SparseVector, n: int) -> float:
    difference = np.zeros(n, np.float32)
    difference[one.indices] = one.values
    difference[other.indices] -= other.values
    return float(np.linalg.norm(difference))


def selected(accumulated: Gradients, outcomes: Sequence[Outcome], density: float) -> dict[str, float]:
    """Elements that are selected: by OkTopk, and locally by Gaussiank's first estimate from the same acc."""
    local = [outcome.report.local_selected for outcome in outcomes]
    estimates = [gaussian_threshold(float(acc.mean(dtype=np.float64)), float(acc.std(dtype=np.float64)), density)
                 for acc in accumulated]
    gaussian = [np.count_nonzero(np.abs(acc) >= threshold)
                for acc, threshold in zip(accumulated, estimates, strict=True)]
    return {"local: OkTopk, least": min(local), "local: OkTopk, most": max(local),
            "local: Gaussiank": float(np.mean(gaussian)), "global: OkTopk": outcomes[0].report.global_selected}


def fill_in(selections: Sequence[SparseVector], k: int) -> dict[str, float]:
    """Elements of the sum over the first 1, 2, 4, ... ranks, over k."""
    counts = [1 << i for i in range(len(selections).bit_length())]
    return {str(count): len(sum_of(selections[:count])) / k for count in counts}
