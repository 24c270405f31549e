"""The options of the modes around a scheme, which users write: `compression=StepAhead(OkTopk(density=0.01))`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import OptionError
from ..schemes import Around
from ..schemes.options import check_integer, check_real, is_auto
from .partial.states import Policy

LONGEST = 1e9
"""Seconds that a wait may take: about what threads can wait for."""
NEEDS_MPI = ("Partial needs MPI (use horovodrun --mpi), and cannot be used in an elastic job: its rounds run without "
             "the help of ranks that are late, and Horovod's own collectives wait for everyone")


@dataclass(frozen=True, eq=False)
class Partial(Around):
    """Eager-SGD (Li et al., PPoPP 2020): a step does not wait for the slowest rank; needs MPI.

    Rounds of reduction run without the ranks that are late. The gradients of those join their next contribution,
    and every rank applies every round's update, in order, so that replicas that have seen the same rounds are equal.

    Args:
        inner: the scheme of a round: `Dense()`, `OkTopk(...)` or another scheme; a class takes its defaults.
            `OkTopk()` by default.
        policy: `"solo"`: the first rank that comes starts a round. `"majority"`: a rank that is drawn anew for each
            round starts it, so that half of the ranks have come on average.
        seed: the seed of the draws.
        max_staleness: most rounds that may run without a rank having seen them; then rounds wait for the rank. Until
            it comes, a rank keeps their updates: 2k words for each with `OkTopk` (with a `global_density` 2k′), n
            with `Dense`.
        timeout: seconds after which that wait fails, on all ranks, and after which a round starts without the rank
            that was drawn.
        in_order: True: a late rank applies the updates that it missed, in order. False: the paper's way: a late rank
            applies the latest round's update alone, replicas drift apart, and `synchronize_replicas` averages them.

    Examples:
        >>> compression = Partial(OkTopk(density=0.01), policy="majority")
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    """

    policy: Policy = "majority"
    seed: int = 0
    max_staleness: int = 16
    timeout: float = 600.0
    in_order: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in get_args(Policy):
            raise OptionError(f"policy must be one of {get_args(Policy)}; got {self.policy!r}")
        check_integer("seed", self.seed, least=0)
        check_integer("max_staleness", self.max_staleness)
        check_real("timeout", self.timeout, "above 0, and at most 1e9", lambda x: 0 < x <= LONGEST)
        if not isinstance(self.in_order, bool):
            raise OptionError(f"in_order must be True or False; got {self.in_order!r}")
        if self.scheme.hierarchical:
            raise OptionError("Partial does not wait for ranks, so those of a host cannot work as one: leave "
                              f"hierarchical out; got an inner scheme with hierarchical={self.scheme.hierarchical!r}")
        if self.scheme.measures:
            raise OptionError("Partial does not wait for ranks, so a step's time does not tell what the network can "
                              "carry: give the inner scheme a number as density; got density='auto'")
        if self.scheme.transport == "horovod":
            raise OptionError(f"{NEEDS_MPI}; got an inner scheme with transport='horovod': leave that out")


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
            have λ times the learning rate, and the shared parameters move by 1/λ of the steps' sum. None: 1/√P for
            optimizers that normalize their gradients (see gain), and 1/⁴√P for others; with `SameBlocks` 1, but
            √(8/P) for more than 8 workers with overlap.
        overlap: an exchange runs while the next step is computed, and is applied before the next local step.
        local_steps: the optimizer's steps for each exchange. More of them send less, and cost accuracy.
        gain: a factor on a rank's own steps. `"auto"`: measured, if the optimizer normalizes its gradients as
            Adam does: its steps are shorter on a rank's small batch than on all ranks' together. Other optimizers
            have 1. A number: that number. None: 1.

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
        if self.gain is not None and not is_auto(self.gain):
            check_real("gain", self.gain, 'above 0, None or "auto"', lambda x: x > 0)

    def coefficient(self, workers: int, normalizes: bool) -> float:
        """Return λ; `normalizes` is True if the optimizer normalizes its gradients."""
        return float(self.ahead or self.scheme.coefficient(workers, normalizes, self.overlap))
