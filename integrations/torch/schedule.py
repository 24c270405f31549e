"""Densities by epoch, stepped like a scheduler of learning rates."""

from __future__ import annotations

from typing import Any

import torch

from horovod_oktopk.errors import OptionError
from horovod_oktopk.schedule import GTOPK_DENSITIES, Schedule, check_epoch, density_of_epoch
from horovod_oktopk.torch.plugin import set_density
from horovod_oktopk.torch.registry import own_run_of


class DensitySchedule:
    """A schedule that sets the density of every epoch, on all ranks alike.

    It does so at once, and then by `step()` after every epoch.

    Args:
        optimizer: made with `compression=OkTopk(...)`, whose density is the one after the schedule.
        schedule: densities of the first epochs; or a function of the epoch (from 0) that gives a density, or None for
            that after the schedule. By default gTop-k's, 25 %, 7.25 %, 1.5 % and 0.4 %, which suit a final density of
            less than that.
        epoch: the epoch that trains next, from 0; a resumed run gives the one at which it goes on.

    Raises:
        OptionError: The schedule is not allowed.
        PluginError: The optimizer was not made with `compression=OkTopk(...)`.

    Examples:
        >>> schedule = DensitySchedule(optimizer, [0.25, 0.1, 0.03])
        >>> for epoch in range(epochs):
        ...     train(epoch)
        ...     schedule.step()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule = GTOPK_DENSITIES, epoch: int = 0,
                 ) -> None:
        self._optimizer = optimizer
        self._density_of = density_of_epoch(schedule)
        self.set_epoch(epoch)

    def step(self) -> None:
        """Begin the next epoch."""
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, as when an elastic job goes back to its last commit."""
        epoch = check_epoch(epoch)
        set_density(self._optimizer, self._density_of(epoch))
        self.epoch = epoch

    @property
    def density(self) -> float:
        """The density of the present epoch."""
        return own_run_of(self._optimizer).scheme.density

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, for a checkpoint."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the checkpoint's epoch, on every rank. Raise OptionError for another object's state."""
        if "epoch" not in state:
            raise OptionError(f"a DensitySchedule's state has an epoch; got one with {sorted(state)}: "
                              "load what its state_dict has returned")
        self.set_epoch(state["epoch"])
