"""One optimizer's reduction: gradient tensors → flat accumulators → sparse updates → gradient tensors.

Handles are taken in the order in which gradients become ready, which differs between ranks. Nothing is communicated
until the first handle is called, when all have been submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.reducer.flat import FlatReducer
from horovod_oktopk.reducer.state import Record
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.torch.accumulator import make_accumulator
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.loss_scale import last_scale
from horovod_oktopk.torch.transport import ranks_of


class Reducer:
    """Reduces the gradients of one hvd.DistributedOptimizer; on every rank of its process set."""

    def __init__(self, optimizer: Any, options: Scheme) -> None:
        self.options = options
        self.scaler: Any = None
        """The GradScaler that scales this optimizer's loss, once it is known."""
        self.ranks = ranks_of(optimizer.process_set)
        self.flat: FlatReducer[TorchLayout] | None = None
        """What reduces the dense gradients; None before the first step, which tells which are sparse."""
        self._optimizer = optimizer
        self._excluded: set[torch.Tensor] = set()
        self._pending: dict[torch.Tensor, torch.Tensor] = {}
        self._results: dict[torch.Tensor, torch.Tensor] = {}
        self._waiting: list[Record] = []  # loaded before the first step, when the layout is not known yet
        self._when_flat: list[Callable[[FlatReducer[TorchLayout]], None]] = []
        # Of the present step:
        self._scale: float | None = None
        self._changed: str | None = None  # which parameter is not what it was, and how
        self._others_finite: dict[torch.Tensor, torch.Tensor] = {}  # of each excluded gradient

    # What Horovod's optimizer calls.

    def submit(self, p: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Takes note that the gradient of p is ready; the handle gives the reduced one, in the same tensor."""
        gradient = p.grad
        assert gradient is not None
        if not self._pending:
            self._begin_step()
        if self.flat is not None and not self.holds(p):
            raise PluginError(f"the gradient of '{self._optimizer._parameter_names[p]}' was sparse at the first step "
                              "and is dense now; what is sparse at first must stay so")
        self._pending[p] = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        return lambda: self._result(p)

    def exclude(self, p: torch.Tensor) -> None:
        """Leaves the (sparse) gradient of p to Horovod's own reduction."""
        assert p.grad is not None
        self._excluded.add(p)
        self._others_finite[p] = torch.isfinite(p.grad._values()).all()

    def no_gradient(self, p: torch.Tensor) -> torch.Tensor:
        """What stands for a gradient that this rank has not computed: zeros, sparse where it is sparse elsewhere."""
        if p in self._excluded:
            nowhere = torch.empty(1, 0, dtype=torch.long, device=p.device)
            return torch.sparse_coo_tensor(nowhere, p.new_empty(0, *p.shape[1:]), p.shape)
        return torch.zeros_like(p)

    def holds(self, p: torch.Tensor) -> bool:
        """Whether p has a place in the flat vector."""
        return self.flat is not None and p in self.flat.layout

    def after_reduction(self, handle: Callable[[], Any]) -> Callable[[], Any]:
        """The handle, to be called after our reduction: it finds differences between ranks before any rank waits."""
        def wait_for_both() -> Any:
            if self._pending:
                self._reduce()
            return handle()
        return wait_for_both

    # What the state and the reports need.

    @property
    def report(self) -> StepReport | None:
        """Of the last step; None before the first."""
        return None if self.flat is None else self.flat.last_report

    def set_density(self, density: float | None) -> None:
        """See FlatReducer.set_density; where gradients are on their way already, for those after them."""
        self.options = self.options.with_density(density)
        if not self._pending:
            self._begin_step()

    def check_scaler(self) -> None:
        """Raises PluginError where a GradScaler cannot serve this optimizer."""

    def when_flat(self, action: Callable[[FlatReducer[TorchLayout]], None]) -> None:
        """Runs the action now, or as soon as the flat vector is laid out."""
        if self.flat is not None:
            action(self.flat)
        else:
            self._when_flat.append(action)

    def records(self) -> list[Record]:
        """This rank's state, for a checkpoint."""
        return [self.flat.record()] if self.flat is not None else self._waiting

    def load_records(self, records: list[Record]) -> None:
        """Takes what `records` gave, on these or other ranks."""
        self._waiting = records
        self.drop()
        self.when_flat(lambda flat: flat.load(self._waiting))

    def drop(self) -> None:
        """Forgets gradients that were submitted and not reduced, as after a failed step."""
        self._pending.clear()
        self._results.clear()
        self._others_finite.clear()

    def abandon_step(self) -> None:
        """Has the optimizer wait for new gradients, whatever was submitted."""
        self.drop()
        forget_handles(self._optimizer)

    # The step.

    def _result(self, p: torch.Tensor) -> torch.Tensor:
        if self._pending:
            self._reduce()
        return self._results.pop(p)

    def _begin_step(self) -> None:
        """Before the first gradient is submitted."""
        if self.flat is None:
            return
        if self.options is not self.flat.options:
            self.flat.set_density(self.options.density)
            self.options = self.flat.options
        self._observe(self.flat)
        self.flat.reset_if_membership_changed()

    def _reduce(self) -> None:
        flat = self.flat or self._lay_out()
        gradients, self._pending = self._pending, {}
        others, self._others_finite = self._others_finite, {}
        if self._changed:
            flat.refuse([*flat.layout.describe(), self._changed], self._changed)
        tensors = [gradients[p] for p in flat.layout.parameters]
        # Nobody else can touch the gradients before they are written: the pass that reads them clears them.
        pieces = (flat.layout.pieces_in_host_memory(tensors, clear=True) if self.options.hierarchical
                  else flat.layout.pieces(tensors))
        update = flat.reduce(pieces, self._scale, clear=True, others_finite=all(map(bool, others.values())))
        with flat.writing():
            reduced = flat.layout.write(update, tensors, cleared=True)
            self._results.update(zip(flat.layout.parameters, reduced, strict=True))

    def _lay_out(self) -> FlatReducer[TorchLayout]:
        names = self._optimizer._parameter_names
        parameters = [p for p in self._optimizer._requires_update if p not in self._excluded]
        layout = TorchLayout({names[p]: p for p in sorted(parameters, key=names.__getitem__)})
        self.flat = self._make_flat(layout)
        for action in self._when_flat:
            action(self.flat)
        self._when_flat.clear()
        self._observe(self.flat)
        return self.flat

    def _observe(self, flat: FlatReducer[TorchLayout]) -> None:
        """What holds for this step: the scale of its gradients, and whether a parameter has changed."""
        self._changed = flat.layout.changed(strides=False)
        self._scale = self._gradient_scale(flat)

    def _make_flat(self, layout: TorchLayout) -> FlatReducer[TorchLayout]:
        return FlatReducer(self.options, self._optimizer.op == hvd.Average, layout, make_accumulator, self.ranks)

    def _gradient_scale(self, flat: FlatReducer[TorchLayout]) -> float | None:
        """The loss scale of the gradients that have been submitted."""
        if self.scaler is None:
            if flat.residual_scale is None:
                return None
            return last_scale()  # resumed: the scaler is known only once it unscales this optimizer
        return float(self.scaler.get_scale())


def forget_handles(optimizer: Any) -> None:
    """Has Horovod's optimizer wait for new gradients."""
    optimizer._handles.clear()
    optimizer._synchronized = False
    for p in optimizer._allreduce_delay:
        optimizer._allreduce_delay[p] = optimizer.backward_passes_per_step
    for bucket in optimizer._group_counts:
        optimizer._group_counts[bucket] = 0

