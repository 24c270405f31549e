"""One optimizer's reduction: gradient tensors → one flat accumulator → one sparse update → gradient tensors.

Handles are taken in the order in which gradients become ready, which differs between ranks; nothing is
communicated until the first of them is called, when all have been submitted. Then everything is reduced
at once, in name order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd

import torch

from ..core.oktopk import OkTopkAllreduce
from ..core.report import StepReport
from ..core.sparse import SparseVector
from ..errors import PluginError, TransportError
from ..options import OkTopk
from ..transport.counting import CountingTransport
from .accumulator import make_accumulator
from .amp import last_scale
from .layout import Layout
from .transport import connect


class Reducer:
    """Reduces the gradients of one hvd.DistributedOptimizer; on every rank of its process set."""

    def __init__(self, optimizer: Any, options: OkTopk) -> None:
        self.options = options
        self.report: StepReport | None = None
        self.scaler: Any = None
        """The GradScaler that scales this optimizer's loss, once it is known."""
        self.residual_scale: float | None = None
        """The loss scale that the residual's unit holds; None where no scaler is used."""
        self._optimizer = optimizer
        self._average = optimizer.op == hvd.Average
        self._layout: Layout | None = None
        self._excluded: set[torch.Tensor] = set()
        self._pending: dict[torch.Tensor, torch.Tensor] = {}
        self._results: dict[torch.Tensor, torch.Tensor] = {}
        self._transport: CountingTransport | None = None
        self._membership: tuple[int, int] | None = None
        self._on_layout: Callable[[], None] | None = None

    # What Horovod's optimizer calls.

    def submit(self, p: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Takes note that the gradient of p is ready; the handle gives the reduced one, in the same tensor."""
        gradient = p.grad
        assert gradient is not None
        if self._layout is not None and p not in self._layout:
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
        return self._layout is not None and p in self._layout

    def after_reduction(self, handle: Callable[[], Any]) -> Callable[[], Any]:
        """The handle, to be called after our reduction: it finds differences between ranks before any rank waits."""
        def wait() -> Any:
            if self._pending:
                self._reduce()
            return handle()
        return wait

    def drop(self) -> None:
        """Forgets gradients that were submitted and not reduced, as after a failed step."""
        self._pending.clear()
        self._results.clear()

    # What the state needs.

    @property
    def layout(self) -> Layout | None:
        """Where every parameter lies in the flat vector; None before the first step."""
        return self._layout

    @property
    def algorithm(self) -> OkTopkAllreduce:
        """The algorithm; only with a layout."""
        return self._algorithm

    @property
    def process_set(self) -> Any:
        """Horovod's process set of the optimizer."""
        return self._optimizer.process_set

    @property
    def residual(self) -> torch.Tensor:
        """The residual, of shape (n,), on the device of the gradients; only with a layout."""
        return torch.as_tensor(self._acc.residual)

    def when_laid_out(self, action: Callable[[], None]) -> None:
        """Runs the action now, or as soon as there is a layout."""
        if self._layout is not None:
            action()
        else:
            self._on_layout = action

    # The step.

    def _result(self, p: torch.Tensor) -> torch.Tensor:
        if self._pending:
            self._reduce()
        return self._results.pop(p)

    def _reduce(self) -> None:
        gradients, self._pending = self._pending, {}
        layout = self._lay_out()
        transport = self._connect()
        transport.reset()
        if layout.n == 0:
            return
        k = self.options.k_of(layout.n)
        tensors = [gradients[p] for p in layout.parameters]
        scale = self._gradient_scale()
        with transport.phase("accumulate"):
            ratio = scale / self.residual_scale if scale and self.residual_scale else 1.0
            finite = self._acc.accumulate(_pieces(tensors, layout), ratio)
        reduction = self._algorithm.reduce(self._acc, k, finite, transport)
        self.report = reduction.report
        with transport.phase("write_back"):
            update = self._scaled(reduction.update)
            if update is None or not layout.representable(update):
                self.report.finite = False
                outputs = [tensor.fill_(float("nan")) for tensor in tensors]
            else:
                self._acc.commit(reduction.contributed)
                self.residual_scale = scale or self.residual_scale
                outputs = layout.write(update, tensors)
        self._results = dict(zip(layout.parameters, outputs, strict=True))

    def _scaled(self, update: SparseVector | None) -> SparseVector | None:
        if update is None or not self._average:
            return update
        assert self._transport is not None
        return SparseVector(update.indices, update.values / update.values.dtype.type(self._transport.size))

    def _lay_out(self) -> Layout:
        if self._layout is None:
            names = self._optimizer._parameter_names
            parameters = [p for p in self._optimizer._requires_update if p not in self._excluded]
            self._layout = Layout({names[p]: p for p in sorted(parameters, key=names.__getitem__)})
            self.options.k_of(max(1, self._layout.n))
            self._acc = make_accumulator(self._layout)
            self._algorithm = self.options.scheme(self._description(self._layout))
            if self._on_layout is not None:
                self._on_layout()
                self._on_layout = None
        return self._layout

    def _description(self, layout: Layout) -> str:
        lines = [f"{name}: {value}" for name, value in self.options.settings().items()]
        return "\n".join([f"compression: {type(self.options).__name__}", *lines,
                          f"op: {'Average' if self._average else 'Sum'}", *layout.describe()])

    def _connect(self) -> CountingTransport:
        """The transport; a new one where elastic training has changed who the ranks are."""
        membership = (self.process_set.rank(), self.process_set.size())
        if self._transport is None or membership != self._membership:
            if self._transport is not None:
                self._algorithm.forget()
            self._transport = CountingTransport(connect(self.process_set, self.options.transport))
            self._membership = membership
            if (self._transport.rank, self._transport.size) != membership:
                raise TransportError(f"Horovod calls this rank {membership[0]} of {membership[1]}; the transport "
                                     f"calls it {self._transport.rank} of {self._transport.size}")
        return self._transport

    def _gradient_scale(self) -> float | None:
        """The loss scale of the gradients that have been submitted."""
        if self.scaler is None:
            if self.residual_scale is None:
                return None
            return last_scale()  # resumed: the scaler is known only once it unscales this optimizer
        return float(self.scaler.get_scale())


def _pieces(tensors: list[torch.Tensor], layout: Layout) -> Iterator[tuple[int, Any]]:
    """The gradients as (offset, flat array) in host memory, or as (offset, flat tensor) on a device."""
    for offset, tensor in zip(layout.offsets[:-1], tensors, strict=True):
        flat = tensor.reshape(-1)
        if flat.device.type != "cpu":
            yield int(offset), flat
        elif flat.dtype is torch.bfloat16:  # NumPy has none: converted in parts, so that no copy of n is made
            for start in range(0, len(flat), 1 << 20):
                yield int(offset) + start, flat[start:start + (1 << 20)].float().numpy()
        else:
            yield int(offset), flat.numpy()


