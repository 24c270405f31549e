"""How even the work of the ranks is: regions of split-and-reduce, and blocks of the allgatherv."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.data_parallel import Outcome
from horovod_oktopk.phases.balance_gather import plan_balance, ring_elements
from horovod_oktopk.phases.regions import owner_rotation
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.schemes.topkdsa import equal_regions
from horovod_oktopk.vectors.sparse import SparseVector

REGION_INTERVAL = 64
"""τ of the paper, and the package's default."""
WORD = 4


class Splits:
    """How even naive and the paper's ways to cut regions are, where rank i owns region i; and what OkTopk did."""

    def __init__(self, n: int, size: int) -> None:
        self._n, self._size = n, size
        self._equal = equal_regions(n, size)
        self._averaged = self._as_often = self._equal

    def step(self, t: int, outcomes: Sequence[Outcome], k: int) -> dict[str, float]:
        """The most words that a rank receives in split-and-reduce, over 2k(P-1)/P."""
        selections = [outcome.selection for outcome in outcomes]
        repartitioned = outcomes[0].report.repartitioned
        if (t - 1) % REGION_INTERVAL == 0:
            self._averaged = averaged_cuts(selections, self._n)
        if repartitioned:
            self._as_often = averaged_cuts(selections, self._n)
        received = {"equal split": largest_received(selections, self._equal),
                    "averaged cuts (paper)": largest_received(selections, self._averaged),
                    "averaged cuts, whenever OkTopk cuts": largest_received(selections, self._as_often),
                    "OkTopk": max(o.report.phases["split_and_reduce"].bytes_received for o in outcomes) / WORD}
        ideal = 2 * k * (self._size - 1) / self._size
        return {"OkTopk cuts": float(repartitioned), **{name: words / ideal for name, words in received.items()}}


def averaged_cuts(selections: Sequence[SparseVector], n: int) -> NDArray[np.int64]:
    """Every rank cuts its own top-k evenly, and the ranks take the mean of their cuts (Section 3.1.1)."""
    size = len(selections)
    own = [s.indices[np.arange(1, size) * len(s) // size] for s in selections]
    return np.concatenate([[0], np.mean(own, axis=0).astype(np.int64), [n]])


def region_counts(selections: Sequence[SparseVector], boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64, shape (P, P): elements of rank i in region j."""
    return np.array([np.diff(np.searchsorted(s.indices, boundaries)) for s in selections])


def largest_received(selections: Sequence[SparseVector], boundaries: NDArray[np.int64]) -> float:
    """Words, where rank i owns region i."""
    counts = region_counts(selections, boundaries)
    return 2.0 * float((counts.sum(axis=0) - np.diagonal(counts)).max())


def gather_figures(outcomes: Sequence[Outcome], boundaries: NDArray[np.int64], k: int) -> dict[str, float]:
    """A direct allgatherv, one after balancing, and what OkTopk did.

    largest/mean: of the blocks before balancing. path: words that pass one link of a ring, P-1 times the largest
    block, and before it the largest move, over 2k(P-1)/P. sent: words of the rank that sends most, over the same.
    """
    size, update = len(outcomes), outcomes[0].update
    sizes = np.diff(np.searchsorted(update.indices, boundaries))
    rotation = owner_rotation(region_counts([outcome.selection for outcome in outcomes], boundaries))
    path, sent = gather_words(sizes, (np.arange(size) + rotation) % size)
    balanced = outcomes[0].report.balanced
    path["OkTopk"] = path["always balanced" if balanced else "direct"]
    sent["OkTopk"] = max(gathered_bytes(outcome.report) for outcome in outcomes) / WORD
    ideal = 2 * k * (size - 1) / size
    return {"largest/mean": float(sizes.max() / sizes.mean()), "balanced": float(balanced),
            **{f"path: {name}": words / ideal for name, words in path.items()},
            **{f"sent: {name}": words / ideal for name, words in sent.items()}}


def gather_words(sizes: NDArray[np.int64], order: NDArray[np.int64]) -> tuple[dict[str, float], dict[str, float]]:
    """Words that pass one link, and words of the rank that sends most. sizes: of the ranks' blocks, in elements.

    order: that of the ranks in the ring.
    """
    plan, positions, others = plan_balance(sizes), np.arange(len(sizes)), len(sizes) - 1
    after, staying = np.diff(plan.after), plan.moved(positions, positions)
    leaving, arriving = sizes - staying, after - staying
    path = {"direct": others * sizes.max(),
            "always balanced": max(leaving.max(), arriving.max()) + others * after.max()}
    sent = {"direct": ring_elements(sizes, order).max(),
            "always balanced": (leaving + ring_elements(after, order)).max()}
    return ({name: 2.0 * float(value) for name, value in path.items()},
            {name: 2.0 * float(value) for name, value in sent.items()})


def gathered_bytes(report: StepReport) -> int:
    return sum(report.phases[name].bytes_sent for name in ("balance", "allgatherv") if name in report.phases)
