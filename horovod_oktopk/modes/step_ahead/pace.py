"""The gain, a factor on a rank's own steps beside λ: it is measured with eight numbers a rank and step.

Adam and its like divide by the root of the mean square of a gradient. A rank's own gradient g is of a batch P times
smaller than the mean ḡ of all ranks, so that E[g²] = μ² + σ² is up to P times E[ḡ²] = μ² + σ²/P, and the rank's steps
are up to √P times shorter than those of dense training. The ratio gives the gain = √(E[g²] / E[ḡ²]).

Such optimizers move all elements about equally far, so all are to count alike. Large gradients are less noisy than
small ones: counted by their squares, they would make the gain too small for the others.

The same ratio gives the gradient noise scale (McCandlish et al., 2018): a batch whose noise equals its signal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...phases.agreement import Measured
from ...transport.base import Transport, allgather_rows
from ...vectors.sparse import Indices, Values
from ...vectors.wire import BLOCK, blocks_of

BLOCKS = 16
"""Blocks of elements that a step looks at."""
SUMS = 8
"""Numbers that a rank tells: sums over BLOCKS / SUMS blocks each, with random signs."""
WINDOW = 50.0
"""Steps over which the running means go."""
NORMALIZERS = frozenset({
    "Adam", "AdamW", "NAdam", "Nadam", "RAdam", "AMSGrad", "Adamax", "SparseAdam", "Adafactor", "Adagrad", "RMSprop",
    "Lion", "Muon", "Lamb", "LAMB", "AdaBelief", "Adan", "AdEMAMix", "ADOPT", "SOAP", "Sophia", "SophiaG"})
"""Optimizers that divide by the root of a second moment, or take signs; see `is_one_of`."""

DUAL_AVERAGERS = frozenset({"Ftrl", "FTRL", "MADGRAD", "DAdaptSGD", "DAdaptAdaGrad"})
"""Optimizers that set the parameters from sums of all their gradients; see `is_one_of`."""

VERSION = re.compile(r"^(?:Paged|Fused|DeepSpeedCPU)|(?:\d+bit|Fp8)$")
"""The parts of a name that tell how an optimizer is computed, and not what it does."""


def normalizes(optimizer: type) -> bool:
    """Return True if the steps of an optimizer of this class do not grow with its gradients.

    The class has an attribute `normalizes_gradients` that says it, or is one of NORMALIZERS.
    """
    said = getattr(optimizer, "normalizes_gradients", None)
    return bool(said) if said is not None else is_one_of(NORMALIZERS, optimizer)


def is_one_of(names: frozenset[str], optimizer: type) -> bool:
    """Return True if the class, or a base of it, has one of these names: so has PagedAdamW8bit the name AdamW."""
    return any(VERSION.sub("", cls.__name__) in names for cls in optimizer.__mro__)


def sample(gather: Callable[[Indices], Values], n: int, step: int, alike: bool) -> Values:
    """Return sums over a rank's gradient at this step, for the roll call: float32, shape (SUMS,).

    The elements of random blocks are added up with random signs, the same on all ranks: the expected square of a sum
    is the sum of these elements' squares. From the ranks' sums, and their sum, follows how noisy one rank's gradient
    is. If `alike`, each block is divided by its norm first, so that all of them count alike.
    """
    random = np.random.default_rng((n, step))
    blocks, which = np.unique(random.integers(blocks_of(n), size=BLOCKS), return_inverse=True)
    places = (BLOCK * blocks[:, None] + np.arange(BLOCK)).clip(max=n - 1)
    signs = 2.0 * random.integers(2, size=(BLOCKS, BLOCK)) - 1
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is left out later
        values = gather(places.ravel()).reshape(places.shape)[which].astype(np.float64)
        sums = (signs * values).sum(axis=1)
        if alike:
            norms = np.linalg.norm(values, axis=1)
            sums = np.divide(sums, norms, out=sums, where=norms != 0)
        told: Values = sums.reshape(SUMS, -1).sum(axis=1).astype(np.float32)
    return told


@dataclass
class GradientNoise:
    """Running means of E[g²], over the ranks, and of E[ḡ²]: the same bits on all ranks, as all are told the same."""

    workers: int = 1
    own: float = 0.0
    mean: float = 0.0

    def become_alike(self, transport: Transport, workers: int) -> None:
        """Take rank 0's means on all ranks, as a rank that joins an elastic job has none. Collective.

        `workers` is the number of workers, each of which has gradients of its own. If the means are of another number
        of them, begin anew.
        """
        row = np.array([self.workers, self.own, self.mean])
        first, own, mean = allgather_rows(row, transport)[0].tolist()
        self.workers, self.own, self.mean = (workers, own, mean) if first == workers else (workers, 0.0, 0.0)

    def note(self, measured: Measured) -> None:
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

    The rows are int64, of shape (r,); a row may come several times, and its values, of shape (r, ...), are added up.
    The wanted places are those in the whole gradient, flat.
    """
    values = values.reshape(len(rows), math.prod(values.shape[1:]))
    row, column = np.divmod(wanted, max(1, values.shape[1]))
    hit = np.isin(rows, row)
    rows, values = rows[hit], values[hit]
    found: Values = ((rows == row[:, None]) * values[:, column].T.astype(np.float64)).sum(axis=1)
    return found


def gain_of(gain: float | Literal["auto"] | None, ratio: float) -> float:
    """Return the gain: the option's number, 1 for None, and for "auto" the root of the ratio; see GradientNoise."""
    return math.sqrt(ratio) if gain == "auto" else 1.0 if gain is None else float(gain)
