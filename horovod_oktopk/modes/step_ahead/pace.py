"""The factors on a rank's own steps, λ and the gain, and the measurement that gives the gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...phases.agreement import Measured
from ...schemes.report import StepReport
from ...transport.base import Hierarchical, Transport
from ...transport.hosts import ranks_per_host
from ...transport.ranks import Ranks
from .noise import Gather, GradientNoise, nothing, sample
from .options import StepAhead


class Pace:
    """λ and the gain of one optimizer. normalizes: True if the optimizer normalizes its gradients, as Adam does."""

    def __init__(self, options: StepAhead, hierarchical: Hierarchical, ranks: Ranks, normalizes: bool) -> None:
        self._normalizes = normalizes
        self._options, self._hierarchical, self._ranks = options, hierarchical, ranks
        self._noise = GradientNoise()
        self.sample = nothing()
        """The sums that this rank tells of its gradient at this step."""

    @property
    def copies(self) -> int:
        """Number of ranks of a worker, which have the same residual."""
        return ranks_per_host(self._ranks, self._hierarchical)

    @property
    def workers(self) -> int:
        """Number of workers, which have gradients and parameters of their own."""
        return self._ranks.membership()[1] // self.copies

    @property
    def coefficient(self) -> float:
        """λ: the factor for the optimizer's learning rate."""
        return self._options.coefficient(self.workers, self._normalizes)

    @property
    def gain(self) -> float:
        """A further factor on the optimizer's steps, but not on those of decoupled weight decay."""
        if self._options.gain == "auto":
            return math.sqrt(self._noise.ratio) if self._normalizes else 1.0
        return 1.0 if self._options.gain is None else float(self._options.gain)

    @property
    def gain_in_words(self) -> str:
        """The gain, for the log."""
        return "measured" if self._options.gain == "auto" and self._normalizes else f"{self.gain:g}"

    def look(self, gather: Gather | None, n: int, step: int) -> None:
        """Sample a gradient of n elements; None: this rank has none that is to be measured at this step."""
        self.sample = nothing() if gather is None or not n or self.workers == 1 else sample(gather, n, step)

    def take(self, measured: Measured | None, report: StepReport) -> None:
        """Take the measurements of all ranks, and put what follows into the report."""
        if measured is not None:
            self._noise.take(measured)
        report.gain, report.noise_ratio, report.noise_scale = self.gain, self._noise.ratio, self._noise.scale

    def become_alike(self, transport: Transport) -> None:
        """Take rank 0's measurements on all ranks. Collective."""
        self._noise.become_alike(transport, self.workers)

    def state(self) -> Mapping[str, Any]:
        """Return plain numbers, for a record."""
        return self._noise.state()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Load the result of `state`; a state of an earlier version may have none."""
        if state is not None:
            self._noise.load_state(state)
