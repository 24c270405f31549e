"""One optimizer's reduction: gradient tensors → one flat accumulator → one sparse update → gradient tensors.

Handles are taken in the order in which gradients become ready, which differs between ranks; nothing is
communicated until the first of them is called, when all have been submitted. Then everything is reduced
at once, in name order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd

import torch

from ..common.reducer import FlatReducer
from ..core.report import StepReport
from ..errors import PluginError
from ..options import Scheme
from .accumulator import make_accumulator
from .amp import last_scale
from .layout import TorchLayout
from .transport import network


class Reducer:
    """Reduces the gradients of one hvd.DistributedOptimizer; on every rank of its process set."""

    def __init__(self, optimizer: Any, options: Scheme) -> None:
        self.options = options
        self.scaler: Any = None
        """The GradScaler that scales this optimizer's loss, once it is known."""
        self.flat: FlatReducer | None = None
        """The reduction of the flat vector; None before the first step, as sparse gradients are not in it."""
        self._optimizer = optimizer
        self._excluded: set[torch.Tensor] = set()
        self._pending: dict[torch.Tensor, torch.Tensor] = {}
        self._results: dict[torch.Tensor, torch.Tensor] = {}
        self._when_flat: Callable[[FlatReducer], None] | None = None

    # What Horovod's optimizer calls.

    def submit(self, p: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Takes note that the gradient of p is ready; the handle gives the reduced one, in the same tensor."""
        gradient = p.grad
        assert gradient is not None
        if self.flat is not None and not self.holds(p):
            raise PluginError(f"the gradient of '{self._optimizer._parameter_names[p]}' was sparse at the first step "
                              "and is dense now; what is sparse at first must stay so")
        self._pending[p] = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        return lambda: self._result(p)

    def exclude(self, p: torch.Tensor) -> None:
        """Leaves the (sparse) gradient of p to Horovod's own reduction."""
        self._excluded.add(p)

    def no_gradient(self, p: torch.Tensor) -> torch.Tensor:
        """What stands for a gradient that this rank has not computed: zeros, sparse where it is sparse elsewhere."""
        if p in self._excluded:
            nowhere = torch.empty(1, 0, dtype=torch.long, device=p.device)
            return torch.sparse_coo_tensor(nowhere, p.new_empty(0, *p.shape[1:]), p.shape)
        return torch.zeros_like(p)

    def holds(self, p: torch.Tensor) -> bool:
        """Whether p has a place in the flat vector."""
        return self.flat is not None and p in self._layout

    def after_reduction(self, handle: Callable[[], Any]) -> Callable[[], Any]:
        """The handle, to be called after our reduction: it finds differences between ranks before any rank waits."""
        def wait() -> Any:
            if self._pending:
                self._reduce()
            return handle()
        return wait

    # What the state and the reports need.

    @property
    def report(self) -> StepReport | None:
        """Of the last step; None before the first."""
        return None if self.flat is None else self.flat.report

    @property
    def process_set(self) -> Any:
        """Horovod's process set of the optimizer."""
        return self._optimizer.process_set

    def set_density(self, density: float) -> None:
        """See FlatReducer.set_density."""
        self.options = self.options.with_density(density)
        if self.flat is not None:
            self.flat.set_density(density)

    def when_flat(self, action: Callable[[FlatReducer], None]) -> None:
        """Runs the action now, or as soon as the flat vector is laid out."""
        if self.flat is not None:
            action(self.flat)
        else:
            self._when_flat = action

    def drop(self) -> None:
        """Forgets gradients that were submitted and not reduced, as after a failed step."""
        self._pending.clear()
        self._results.clear()

    # The step.

    def _result(self, p: torch.Tensor) -> torch.Tensor:
        if self._pending:
            self._reduce()
        return self._results.pop(p)

    def _reduce(self) -> None:
        gradients, self._pending = self._pending, {}
        flat = self.flat or self._lay_out()
        layout = self._layout
        tensors = [gradients[p] for p in layout.parameters]
        update = flat.step(layout.pieces(tensors), self._gradient_scale(flat), layout.representable)
        with flat.writing():
            self._results = dict(zip(layout.parameters, layout.write(update, tensors), strict=True))

    def _lay_out(self) -> FlatReducer:
        names = self._optimizer._parameter_names
        parameters = [p for p in self._optimizer._requires_update if p not in self._excluded]
        self._layout = TorchLayout({names[p]: p for p in sorted(parameters, key=names.__getitem__)})
        self.flat = FlatReducer(self.options, self._optimizer.op == hvd.Average, self._layout,
                                make_accumulator(self._layout), network(self.process_set))
        if self._when_flat is not None:
            self._when_flat(self.flat)
            self._when_flat = None
        return self.flat

    def _gradient_scale(self, flat: FlatReducer) -> float | None:
        """The loss scale of the gradients that have been submitted."""
        if self.scaler is None:
            if flat.residual_scale is None:
                return None
            return last_scale()  # resumed: the scaler is known only once it unscales this optimizer
        return float(self.scaler.get_scale())
