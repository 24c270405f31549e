"""The option that users write: `compression=StepAhead(OkTopk(density=0.01))`."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from ...errors import OptionError
from ...schemes import Around
from ...schemes.base import check_integer, check_real


@dataclass(frozen=True, eq=False)
class StepAhead(Around):
    """Step-ahead error feedback (Xu, Huo and Huang, AAAI 2021), over parameters instead of gradients.

    Each rank takes its optimizer's step by itself, on parameters p of its own. The moves are reduced afterwards:
    w, the parameters that all ranks share, moves by the average of the elements that the ranks have selected of
    w − p. The rest remains in p. So each rank computes its gradients ahead of w, by the moves not sent yet.

    Args:
        inner: the scheme that reduces w − p: `OkTopk(...)`, another scheme, or `Dense()`; a class takes its defaults.
            `OkTopk()` by default.
        ahead: λ, the step-ahead coefficient, in (0, 1]: gradients are computed at w − λ · residual. A rank's steps
            have λ times the learning rate, and the shared parameters move by 1/λ of the steps' sum. None: 1/√P
            for optimizers that normalize their gradients (see gain), and 1/⁴√P for others.
        overlap: an exchange runs while the next step is computed, and is applied before the next local step.
        local_steps: the optimizer's steps for each exchange. More of them send less, and cost accuracy.
        gain: a factor on a rank's own steps. `"auto"`: measured, if the optimizer normalizes its gradients as
            Adam does: its steps are shorter on a rank's small batch than on all ranks' together. Other optimizers
            have 1. A number: that number. None: 1.

    Raises:
        OptionError: A value is not allowed.

    Examples:
        >>> compression = StepAhead(OkTopk(density=0.01))
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    """

    ahead: float | None = None
    overlap: bool = True
    local_steps: int = 1
    gain: float | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ahead is not None:
            check_real("ahead", self.ahead, "in (0, 1]", lambda x: 0 < x <= 1)
        if not isinstance(self.overlap, bool):
            raise OptionError(f"overlap must be True or False; got {self.overlap!r}")
        check_integer("local_steps", self.local_steps)
        if self.gain not in (None, "auto"):
            check_real("gain", self.gain, 'above 0, None or "auto"', lambda x: x > 0)

    def coefficient(self, workers: int, normalizes: bool) -> float:
        """Return λ for this number of workers. normalizes: True if the optimizer normalizes its gradients.

        If so, noise makes a rank's steps no shorter, and more of w - p is noise.
        """
        if self.ahead is not None:
            return float(self.ahead)
        return 1 / sqrt(workers) if normalizes else 1 / sqrt(sqrt(workers))
