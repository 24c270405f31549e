"""The factors on a rank's own steps: λ, and the gain, which is measured with eight numbers a rank and step.

Adam and its like divide by the root of the mean square of a gradient. A rank's own gradient g is of a batch P times
smaller than the mean ḡ of all ranks, so that E[g²] = μ² + σ² is up to P times E[ḡ²] = μ² + σ²/P, and the rank's steps
are up to √P times shorter than those of dense training. The ratio gives the gain = √(E[g²] / E[ḡ²]).

The same ratio gives the gradient noise scale (McCandlish et al., 2018): a batch whose noise equals its signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...errors import PluginError
from ...phases.agreement import Measured
from ...schemes.report import StepReport
from ...transport.base import Ranks, Transport
from ...vectors.sparse import Indices, Values
from ..options import StepAhead

Gather = Callable[[Indices], Values]
"""A function that returns the elements of a rank's gradient at these places of the layout.

The places are int64, ascending; a place may come twice.
"""

NEEDS_ALL_RANKS = ("StepAhead with hierarchical=True needs all ranks of the job: give the number of ranks of a host "
                   "instead, or no process set")
SAMPLES = 1024
"""Elements that a step looks at."""
SUMS = 8
"""Numbers that a rank tells: sums of SAMPLES / SUMS elements each, with random signs."""
WINDOW = 50.0
"""Steps over which the running means go."""
NORMALIZERS = frozenset({
    "Adam", "AdamW", "NAdam", "Nadam", "RAdam", "AMSGrad", "Adamax", "SparseAdam", "Adafactor", "Adagrad", "RMSprop",
    "Lion", "Muon", "Lamb", "LAMB", "AdaBelief", "Sophia"})
"""Optimizers that divide by the root of a second moment, or take signs, by the names of their classes."""


def normalizes(optimizer: type) -> bool:
    """Return True if the steps of an optimizer of this class do not grow with its gradients.

    The class has an attribute `normalizes_gradients` that says it, or is derived from a class of NORMALIZERS.
    """
    said = getattr(optimizer, "normalizes_gradients", None)
    return bool(said) if said is not None else any(cls.__name__ in NORMALIZERS for cls in optimizer.__mro__)


def sample(gather: Gather, n: int, step: int) -> Values:
    """Return the sums that a rank tells of its gradient at this step: float32, shape (SUMS,).

    Random elements with random signs, the same on all ranks, are added up. So the expected square of a sum is the sum
    of the elements' squares.
    """
    random = np.random.default_rng((n, step))
    signs = 2.0 * random.integers(2, size=SAMPLES) - 1
    places = np.sort(random.integers(n, size=SAMPLES))
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is left out later
        sums: Values = (signs * gather(places)).reshape(-1, SUMS).sum(axis=0).astype(np.float32)
    return sums


@dataclass
class GradientNoise:
    """Running means of E[g²], over the ranks, and of E[ḡ²]: the same bits on all ranks, as all are told the same."""

    workers: int = 1
    own: float = 0.0
    mean: float = 0.0

    def become_alike(self, transport: Transport, workers: int) -> None:
        """Take rank 0's means on all ranks, as a rank that joins an elastic job has none. Collective.

        workers: the number of workers that have gradients of their own: the ranks, or the hosts. If the means are of
        another number of workers, begin anew.
        """
        row = np.array([self.workers, self.own, self.mean])
        first, own, mean = transport.allgather(row.view(np.int64))[0].view(np.float64).tolist()
        self.workers, self.own, self.mean = (workers, own, mean) if first == workers else (workers, 0.0, 0.0)

    def take(self, measured: Measured) -> None:
        """Take the measurements of all ranks at one step; skip the step if some rank had none."""
        own = measured.squares / measured.size
        mean = float(np.square(measured.total / measured.size).sum())
        if math.isfinite(own) and math.isfinite(mean):
            self.own += (own - self.own) / WINDOW
            self.mean += (mean - self.mean) / WINDOW

    @property
    def ratio(self) -> float:
        """E[g²] / E[ḡ²], within 1 and the number of workers; 1 before anything was measured."""
        if self.own <= self.mean:
            return 1.0
        return min(self.own / self.mean, float(self.workers)) if self.mean > 0 else float(self.workers)

    @property
    def scale(self) -> float:
        """The gradient noise scale, as a multiple of the batch of all workers; NaN on one worker.

        With B samples in a worker's batch, E[g²] = |G|² + S/B, E[ḡ²] = |G|² + S/(PB), and the scale is S/|G|².
        """
        if self.workers == 1 or self.own == 0:
            return math.nan
        ratio = self.ratio
        return (ratio - 1) / (self.workers - ratio) if ratio < self.workers else math.inf


def elements_of_rows(rows: Indices, values: Values, wanted: Indices) -> Values:
    """Return elements of a gradient of which only some rows are given: float64, as many as `wanted`.

    rows: int64, shape (r,), a row may come several times, and its values are added up; values: shape (r, ...);
    wanted: places in the whole gradient, flat.
    """
    values = values.reshape(len(rows), math.prod(values.shape[1:]))
    row, column = np.divmod(wanted, max(1, values.shape[1]))
    hit = np.isin(rows, row)
    rows, values = rows[hit], values[hit]
    found: Values = ((rows == row[:, None]) * values[:, column].T.astype(np.float64)).sum(axis=1)
    return found


def gather_by_parts(wanted: Indices, offsets: Indices, element: Callable[[int, Indices], Values]) -> Values:
    """Return elements of a flat vector of several parts; query only the parts that contain wanted elements.

    wanted: ascending. offsets: the start of each part, then the total length. element: returns a part's elements,
    given the part's number and positions within the part.
    """
    cuts = np.searchsorted(wanted, offsets)
    found = [element(part, wanted[first:last] - offsets[part])
             for part, (first, last) in enumerate(pairwise(cuts.tolist())) if first < last]
    return np.concatenate([*found, np.empty(0)])


def coefficient_of(ahead: float | None, workers: int, normalizes: bool) -> float:
    """Return λ, which is `ahead` if that is given. normalizes: True if the optimizer normalizes its gradients.

    If so, noise makes a rank's steps no shorter, and more of w - p is noise.
    """
    if ahead is not None:
        return float(ahead)
    return 1 / math.sqrt(workers) if normalizes else 1 / math.sqrt(math.sqrt(workers))


class Pace:
    """λ and the gain of one optimizer. normalizes: True if the optimizer normalizes its gradients, as Adam does."""

    def __init__(self, options: StepAhead, ranks: Ranks, normalizes: bool) -> None:
        self._options, self._ranks, self._normalizes = options, ranks, normalizes
        self.noise = GradientNoise()
        self.sample: Values | None = None
        """The sums that this rank tells of its gradient at this step; None if the step is not measured."""

    @property
    def copies(self) -> int:
        """Number of ranks of a worker, which have the same residual; `connect` checks that the job divides so."""
        hierarchical = self._options.scheme.hierarchical
        if not hierarchical or self._ranks.membership().size == 1:
            return 1
        copies = self._ranks.host()[1] if hierarchical is True else int(hierarchical)
        if copies is None:
            raise PluginError(NEEDS_ALL_RANKS)
        return copies

    @property
    def workers(self) -> int:
        """Number of workers, which have gradients and parameters of their own."""
        return self._ranks.membership()[1] // self.copies

    @property
    def coefficient(self) -> float:
        """λ: the factor for the optimizer's learning rate."""
        return coefficient_of(self._options.ahead, self.workers, self._normalizes)

    @property
    def gain(self) -> float:
        """A further factor on the optimizer's steps, but not on those of decoupled weight decay."""
        if self._options.gain == "auto":
            return math.sqrt(self.noise.ratio) if self._normalizes else 1.0
        return 1.0 if self._options.gain is None else float(self._options.gain)

    def look(self, gather: Gather | None, n: int, step: int) -> None:
        """Sample a gradient of n elements; None: this rank has none that is to be measured at this step."""
        self.sample = None if gather is None or not n or self.workers == 1 else sample(gather, n, step)

    def take(self, measured: Measured | None, report: StepReport) -> None:
        """Take the measurements of all ranks, and put what follows into the report."""
        if measured is not None:
            self.noise.take(measured)
        report.gain, report.noise_ratio, report.noise_scale = self.gain, self.noise.ratio, self.noise.scale
