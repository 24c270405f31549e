"""What a framework's driver gives: ways to train (kinds), and trainers whose gradients are known exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from horovod_oktopk.schemes.report import StepReport

Gradients = Mapping[str, np.ndarray]


class Trainer(Protocol):
    """A model whose parameters start at zero, and plain SGD with learning rate 1 (if not given)."""

    def step(self, grads: Gradients) -> None:
        """One step with exactly these gradients on this rank; names that are missing have none."""

    def values(self) -> dict[str, np.ndarray]:
        """The parameters; with StepAhead those that all ranks share."""

    def own_values(self) -> dict[str, np.ndarray]:
        """What the model holds on this rank."""

    def report(self) -> StepReport | None: ...

    def residual(self) -> np.ndarray:
        """This rank's residual, in name order."""

    def save(self, path: str) -> None:
        """All ranks' state to one file; together."""

    def load(self, path: str) -> None:
        """Its state, on all ranks together; the parameters are not in it."""

    def lr(self) -> float: ...

    def set_lr(self, lr: float) -> None: ...

    def synchronize_replicas(self) -> None:
        """Makes the replicas equal, where `Partial` was given."""

    def set_density(self, density: float) -> None: ...

    def assign(self, values: Gradients) -> None:
        """Sets the parameters; with StepAhead those that all ranks share."""


class Kind(Protocol):
    """One way of training in one framework."""

    name: str
    hvd: Any
    sets: list[Any]
    """Two process sets that divide the ranks, where there are several."""
    collectives: Any
    """The framework's HorovodTransport."""
    runs_partial: bool
    """Whether partial rounds work in this job."""
    saves_together: bool
    """Whether `save` of a trainer is one call of ours on all ranks."""
    op_error: type[Exception]
    """What refuses op=Adasum: PluginError, or Horovod's own ValueError."""

    def supports(self, argument: str) -> bool:
        """Whether an argument of Horovod's can be given, or "partial": whether `Partial` can."""

    def __call__(self, compression: Any, dtype: str = "float32", shapes: Mapping[str, tuple[int, ...]] | None = None,
                 lr: float = 1.0, momentum: float = 0.0, normalizes: bool = False, **arguments: Any) -> Trainer:
        """A trainer; arguments: Horovod's, where groups name parameters. normalizes: what the optimizer says."""

    def rewrite(self, path: str, residuals: list[np.ndarray]) -> None:
        """Makes a file that a trainer saved one of as many ranks as there are residuals."""

    def passes(self, trainer: Trainer, several: list[Gradients]) -> None:
        """The backward passes of one step, where `backward_passes_per_step` was given."""
