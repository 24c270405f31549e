"""One optimizer's reduction: gradient tensors → flat accumulators → sparse updates → gradient tensors.

Handles are taken in the order in which gradients become ready, which differs between ranks. In one bucket, nothing
is communicated until the first handle is called, when all have been submitted. In several, a thread reduces each
as soon as it and those before it are complete; what they give is written when all are done, or undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import horovod.torch as hvd
import numpy as np

import torch

from ..errors import PluginError
from ..reducer.bucket_trial import Sample
from ..reducer.flat import FlatReducer
from ..reducer.state import Record
from ..schemes.base import Scheme
from ..schemes.report import StepReport
from .accumulator import make_accumulator
from .layout import TorchLayout
from .loss_scale import last_scale
from .transport import network


class Reducer:
    """Reduces the gradients of one hvd.DistributedOptimizer; on every rank of its process set."""

    def __init__(self, optimizer: Any, options: Scheme) -> None:
        self.options = options
        self.scaler: Any = None
        """The GradScaler that scales this optimizer's loss, once it is known."""
        self.network = network(optimizer.process_set, own_channel=options.bucket_bytes is not None)
        self.flat: FlatReducer[TorchLayout] | None = None
        """What reduces the dense gradients; None before the first step, which tells which are sparse."""
        self._optimizer = optimizer
        self._excluded: set[torch.Tensor] = set()
        self._pending: dict[torch.Tensor, torch.Tensor] = {}
        self._results: dict[torch.Tensor, torch.Tensor] = {}
        self._waiting: list[Record] = []  # loaded before the first step, when the layout is not known yet
        self._when_flat: list[Callable[[FlatReducer[TorchLayout]], None]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        # Of the present step:
        self._scale: float | None = None
        self._changed: str | None = None  # which parameter is not what it was, and how
        self._ready: dict[torch.Tensor, float] = {}  # when each gradient was submitted
        self._missing: list[int] = []  # gradients of each bucket that were not, where buckets may start
        self._started: list[Future[None]] = []
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
        self._ready[p] = time.perf_counter()
        if self._missing:
            self._missing[self._bucket_of[p]] -= 1
            self._start_what_is_complete()
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
        self.drop()  # first, as a bucket may be on its way
        self.when_flat(lambda flat: flat.load(self._waiting))

    def drop(self) -> None:
        """Forgets gradients that were submitted and not reduced, as after a failed step; on all ranks together.

        Buckets that are on their way on some rank are ended on all, with zeros for what is not there.
        """
        gradients, self._pending = self._pending, {}
        if self._missing and gradients and self.flat is not None:
            absent = (p for p in self.flat.layout.parameters if p not in gradients)
            self._end({**gradients, **{p: torch.zeros_like(p) for p in absent}}, self.flat)
        self._started.clear()
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
        self._missing = []
        if self.flat is None:
            return
        if self.options is not self.flat.options:
            self.flat.set_density(self.options.density)
            self.options = self.flat.options
        self._observe(self.flat)
        self.flat.reset_if_membership_changed()
        # Not in the first step: ranks connect in the order of their steps.
        if len(self.flat.buckets) > 1 and self.flat.is_connected and not self._changed:
            self._missing = [len(bucket.members) for bucket in self.flat.buckets]
            self._bucket_of = {p: index for index, bucket in enumerate(self.flat.buckets)
                               for p in bucket.layout.parameters}

    def _start_what_is_complete(self) -> None:
        """Hands complete buckets to the thread, in their order, which is the same on all ranks."""
        assert self.flat is not None
        ready = len(self._missing) - bool(self._excluded)  # the last waits until it is known that those are finite
        while len(self._started) < ready and not self._missing[len(self._started)]:
            self._started.append(self._start(self.flat, len(self._started), self._pending))

    def _reduce(self) -> None:
        flat = self.flat or self._lay_out()
        gradients, self._pending = self._pending, {}
        if self._changed:
            flat.refuse([*flat.layout.describe(), self._changed], self._changed)
        for future in self._end(gradients, flat):
            future.result()
        updates = flat.finish()
        with flat.writing():
            for index, bucket in enumerate(flat.buckets):
                tensors = [gradients[p] for p in bucket.layout.parameters]
                reduced = bucket.layout.write(None if updates is None else updates[index], tensors,
                                              cleared=len(flat.buckets) == 1)
                self._results.update(zip(bucket.layout.parameters, reduced, strict=True))
        if flat.is_trying:
            flat.learn(self._sample(flat))

    def _end(self, gradients: dict[torch.Tensor, torch.Tensor], flat: FlatReducer[TorchLayout]) -> list[Future[None]]:
        """Starts the buckets that have not been, and waits for all: until then gradients are still being read."""
        started, self._started = self._started, []
        others, self._others_finite = self._others_finite, {}
        finite = all(map(bool, others.values()))
        for index in range(len(started), len(flat.buckets)):
            started.append(self._start(flat, index, gradients, finite))
        wait(started)
        return started

    def _start(self, flat: FlatReducer[TorchLayout], index: int, gradients: dict[torch.Tensor, torch.Tensor],
               others_finite: bool = True) -> Future[None]:
        layout = flat.buckets[index].layout
        tensors = [gradients[p] for p in layout.parameters]
        if len(flat.buckets) == 1:  # nobody else can touch the gradients before they are written
            flat.reduce(index, self._pieces(layout, tensors, clear=True), self._scale, clear=True,
                        others_finite=others_finite)
            return _done()
        self._thread = self._thread or ThreadPoolExecutor(1, "horovod_oktopk")
        if layout.device.type != "cuda":
            return self._thread.submit(flat.reduce, index, self._pieces(layout, tensors), self._scale, False,
                                       others_finite)
        # A stream of its own: in the default one it would wait for the whole backward pass.
        ready = torch.cuda.current_stream(layout.device).record_event()
        self._stream = self._stream or torch.cuda.Stream(layout.device)  # type: ignore[no-untyped-call]
        return self._thread.submit(self._reduce_on_stream, flat, index, tensors, ready, others_finite)

    def _pieces(self, layout: TorchLayout, tensors: list[torch.Tensor], clear: bool = False) -> Any:
        """Where its accumulator lies: the ranks of a host add up gradients in its memory."""
        return layout.pieces_in_host_memory(tensors, clear) if self.options.hierarchical else layout.pieces(tensors)

    def _reduce_on_stream(self, flat: FlatReducer[TorchLayout], index: int, tensors: list[torch.Tensor], ready: Any,
                          others_finite: bool) -> None:
        with torch.cuda.stream(self._stream):
            ready.wait()
            flat.reduce(index, self._pieces(flat.buckets[index].layout, tensors), self._scale, False, others_finite)
            assert self._stream is not None
            self._stream.synchronize()

    def _sample(self, flat: FlatReducer[TorchLayout]) -> Sample:
        ready = np.array([self._ready[p] for p in flat.layout.parameters])
        assert flat.report is not None
        return Sample(ready - ready.min(), flat.report.seconds, time.perf_counter() - ready.min())

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
        place = {p: index for index, p in enumerate(layout.parameters)}
        registered = [p for group in self._optimizer.param_groups for p in group["params"]]
        ready = [place[p] for p in reversed(registered) if p in place]  # as the backward pass goes, in most models
        return FlatReducer(self.options, self._optimizer.op == hvd.Average, layout, make_accumulator, self.network,
                           order=ready)

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


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
