"""An elastic TorchState with optimizers of ours: with StepAhead it saves and broadcasts what all ranks share."""

from __future__ import annotations

from horovod_oktopk.modes.api import shared_parameters
from horovod_oktopk.torch.private import trained_by
from horovod_oktopk.torch_base.registry import runs_of
from horovod_oktopk.transport.elastic import ElasticState


class ElasticTorchState(ElasticState):
    """The mixin of a TorchState: it saves and sends what all ranks share."""

    def save(self) -> None:
        """Save the shared parameters, and this rank's residuals."""
        with shared_parameters(*trained_by(self)):
            super().save()  # type: ignore[misc]

    def sync(self) -> None:
        """Give a rank that joins the shared parameters, and no residual; the others' residuals stay."""
        for each in trained_by(self):
            for run in runs_of(each):
                run.suspend()
        super().sync()  # type: ignore[misc]
