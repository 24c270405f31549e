"""An elastic TorchState with optimizers of ours: with StepAhead it saves and broadcasts what all ranks share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from horovod_oktopk.modes.api import shared_parameters
from horovod_oktopk.state.records import Record
from horovod_oktopk.torch.private import trained_by
from horovod_oktopk.torch_base.registry import runs_of
from horovod_oktopk.torch_base.run import Run
from horovod_oktopk.transport.elastic import ElasticState


class ElasticTorchState(ElasticState):
    """The mixin of a TorchState: it saves and sends what all ranks share."""

    _oktopk_records: Mapping[Run, list[Record]] = {}  # of optimizers that are not in the state, which has the model

    def save(self) -> None:
        """Save the shared parameters, and this rank's residuals."""
        with shared_parameters(*trained_by(self)):
            super().save()  # type: ignore[misc]
            self._oktopk_records = {run: run.records() for run in self._runs_beside()}

    def restore(self) -> None:
        """Restore the parameters and this rank's residuals."""
        super().restore()  # type: ignore[misc]
        for run in self._runs_beside():
            if run.mode is not None:
                run.mode.load(self._oktopk_records.get(run, []))

    def _runs_beside(self) -> set[Run]:
        """Return the runs of optimizers that train the state's models, and are not in the state themselves."""
        trained = trained_by(self)
        inside = {run for each in trained if isinstance(each, torch.optim.Optimizer) for run in runs_of(each)}
        return {run for each in trained for run in runs_of(each)} - inside

    def sync(self) -> None:
        """Give a rank that joins the shared parameters, and no residual; the others' residuals stay."""
        for each in trained_by(self):
            for run in runs_of(each):
                run.suspend()
        super().sync()  # type: ignore[misc]
