"""Interface of a framework's driver: ways to train (kinds), and trainers with known gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from horovod_oktopk.schemes.report import StepReport

Gradients = Mapping[str, np.ndarray]


class Trainer(Protocol):
    """A model whose parameters start at zero, and plain SGD with learning rate 1 (if not given)."""

    def step(self, grads: Gradients) -> None:
        """Take a step with exactly these gradients on this rank; names that are missing have none."""

    def values(self) -> dict[str, np.ndarray]:
        """Return the parameters; with StepAhead those that all ranks share."""

    def own_values(self) -> dict[str, np.ndarray]:
        """Return what the model holds on this rank."""

    def report(self) -> StepReport | None: ...

    def residual(self) -> np.ndarray:
        """Return this rank's residual, in name order."""

    def save(self, path: str) -> None:
        """Save all ranks' state to one file. Collective."""

    def load(self, path: str) -> None:
        """Load a state, without the parameters. Collective."""

    def lr(self) -> float: ...

    def set_lr(self, lr: float) -> None: ...

    def catch_up(self) -> None:
        """Apply the exchange under way, if `StepAhead` was given."""

    def synchronize_replicas(self) -> None:
        """Make the replicas equal, if `Partial` was given."""

    def set_density(self, density: float) -> None: ...

    def assign(self, values: Gradients) -> None:
        """Set the parameters; with StepAhead those that all ranks share."""


class Kind(Protocol):
    """One way of training in one framework."""

    name: str
    hvd: Any
    sets: list[Any]
    """Two process sets that divide the ranks, where there are several."""
    collectives: Any
    """The framework's HorovodTransport."""
    route: str
    """The carrier of messages where MPI is none, as the log says it."""
    runs_partial: bool
    """True if partial rounds work in this job."""
    saves_together: bool
    """True if `save` of a trainer is one call of ours on all ranks."""
    op_error: type[Exception]
    """Class of the error for op=Adasum: PluginError, or Horovod's own ValueError."""

    def supports(self, argument: str) -> bool:
        """Return True if an argument of Horovod's, or `Partial` for "partial", can be given."""

    def __call__(self, compression: Any, dtype: str = "float32", shapes: Mapping[str, tuple[int, ...]] | None = None,
                 lr: float = 1.0, momentum: float = 0.0, normalizes: bool = False, **arguments: Any) -> Trainer:
        """Return a trainer. arguments: Horovod's; groups name parameters. normalizes: the optimizer's claim."""

    def rewrite(self, path: str, residuals: list[np.ndarray]) -> None:
        """Turn a file that a trainer saved into one of as many ranks as there are residuals."""

    def passes(self, trainer: Trainer, several: list[Gradients]) -> None:
        """Run the backward passes of one step, if `backward_passes_per_step` was given."""
