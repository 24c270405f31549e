"""`compression=StepAhead(...)`: the optimizer takes its own steps, and what they did to the parameters is reduced.

Gradients stay the program's own: no hook of Horovod's is used, and clipping, loss scaling, closures and fused
optimizers are as without Horovod. Where each host is one worker, Horovod's hooks average gradients over its ranks,
and all of that is as with stock Horovod.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.reducer.state import Record, parameters_of
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.step_ahead.noise import normalizes
from horovod_oktopk.step_ahead.options import StepAhead
from horovod_oktopk.step_ahead.reducer import StepAheadReducer as Core
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.local_step import are_finite, gradient_elements, lengthened
from horovod_oktopk.torch.parameter_accumulator import TorchParameterAccumulator
from horovod_oktopk.torch.replica import TorchHostReplica, TorchReplica, flat_memory
from horovod_oktopk.torch.transport import ranks_of

logger = logging.getLogger("horovod_oktopk")

NO_CLOSURE = ("with hierarchical a closure's gradients cannot be averaged over the ranks of a host: call "
              "optimizer.step() without one, after loss.backward()")


TWICE = ("optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
         "gradients are averaged over the host twice")
_UNKNOWN = object()
_all: weakref.WeakSet[StepAheadReducer] = weakref.WeakSet()


def hand_over(optimizer: Any) -> None:
    """Has other optimizers with StepAhead leave this one's parameters: then these are those that all ranks share.

    When it is made, or takes a step after them. They would hold each rank's own parameters otherwise.
    """
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    for other in list(_all):
        if other._optimizer is not optimizer and other.core is not None and not wanted.isdisjoint(
                other.core.layout.parameters):
            other.suspend()


class StepAheadReducer:
    """Takes the steps of one hvd.DistributedOptimizer; on every rank of its process set."""

    def __init__(self, optimizer: Any, options: StepAhead) -> None:
        self.step_ahead = options
        self.ranks = ranks_of(optimizer.process_set, own_channel=True, yield_cpu=options.overlap)
        self.core: Core[TorchLayout] | None = None
        """None before the first step."""
        self._options = options.scheme
        self._optimizer = optimizer
        self._waiting: list[Record] = []
        self._has_warned = False
        self._host_set: Any = _UNKNOWN
        _all.add(self)

    # The step.

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """In place of Horovod's `step`: the optimizer's own, between an exchange's end and the next one's beginning.

        A rank whose gradients are not finite skips its own step, and takes part in the exchange with what it has.
        """
        if not self.ranks.takes_part:
            return self._local_step(closure)
        self._synchronize(closure)
        core = self._begin()
        result = None
        if closure is not None:  # which computes the gradients
            with lengthened(self._optimizer, core.coefficient, core.gain):
                result = self._local_step(closure)
            self._observe(core)
        elif are_finite([p.grad for p in self._parameters() if p.grad is not None]):
            self._observe(core)
            with lengthened(self._optimizer, core.coefficient, core.gain):
                result = self._local_step(None)
        else:
            core.skip_local_step()
        core.end_step()
        return result

    def skip(self) -> None:
        """In place of a step that this rank does not take: the others' exchange needs it all the same."""
        if self.ranks.takes_part:
            self._optimizer._synchronized = False
            self._begin().end_step()

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks of a host, by Horovod's hooks."""
        return bool(self._options.hierarchical)

    def find_host(self) -> bool:
        """Has Horovod reduce gradients over this rank's host, from the first one on; on all ranks together.

        Says whether other ranks are there.
        """
        if self._host_set is _UNKNOWN:
            self._host_set = self.ranks.host_set(self._options.transport, self._options.hierarchical)
            if self._host_set is not None:
                self._optimizer.process_set = self._host_set
        return self._host_set is not None

    def _synchronize(self, closure: Callable[[], Any] | None) -> None:
        """As Horovod's own step does."""
        optimizer = self._optimizer
        if not self.averages:
            return
        if closure is not None:
            raise PluginError(NO_CLOSURE)
        if optimizer._should_synchronize:
            if optimizer._synchronized:
                warnings.warn(TWICE, stacklevel=3)
            optimizer.synchronize()
        optimizer._synchronized = False

    def before_synchronize(self) -> None:
        """Has Horovod average the gradients of all parameters: also of those that have joined the optimizer, or were
        unfrozen, since it made its hooks."""
        optimizer = self._optimizer
        for name, p in self._named().items() if self.averages and optimizer._grad_accs else ():
            if p.requires_grad and p not in optimizer._requires_update:
                optimizer._requires_update.add(p)
                optimizer._parameter_names.setdefault(p, name)

    def _begin(self) -> Core[TorchLayout]:
        core = self._laid_out()
        if not core.is_started:
            hand_over(self._optimizer)
        core.begin_step()
        return core

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        return super(type(self._optimizer), self._optimizer).step(closure)  # type: ignore[misc]

    def _observe(self, core: Core[TorchLayout]) -> None:
        core.observe(gradient_elements(core.layout, getattr(self._optimizer, "grad_scale", None)))

    # Which parameters.

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _named(self) -> dict[str, torch.Tensor]:
        names = self._optimizer._parameter_names
        named = {names.get(p, f"unnamed.{index}"): p for index, p in enumerate(self._parameters())}
        return {name: named[name] for name in sorted(named)}

    def _laid_out(self) -> Core[TorchLayout]:
        """The core of the present parameters: a new one at first, and after `add_param_group`."""
        core = self.core
        if core is not None and len(core.layout.parameters) == len(self._parameters()):
            message = core.layout.changed()
            if message is not None:
                core.refuse(message)
            return core
        before, self.core = core, self._make_core(TorchLayout(self._named()))
        if before is not None:
            before.suspend()
            self._waiting = [_extended(before.record(), self.core.layout)]
        if self._waiting:
            self.core.load(self._waiting)
            self._waiting = []
        return self.core

    def _make_core(self, layout: TorchLayout) -> Core[TorchLayout]:
        names = [name for name, *_ in layout.entries]

        def read() -> list[torch.Tensor]:
            message = layout.changed()
            if message is not None:
                raise PluginError(message)
            return [flat_memory(name, p) for name, p in zip(names, layout.parameters, strict=True)]

        average = self._optimizer.op == hvd.Average
        if layout.device.type == "cpu":
            replica: Any = TorchHostReplica(layout, read)
            accumulator: Any = NumpyParameterAccumulator(layout.n, layout.dtype)
        else:
            replica = TorchReplica(layout, read)
            accumulator = TorchParameterAccumulator(layout.n, layout.dtype, layout.device)
        core = Core(self.step_ahead, average, layout, accumulator, replica, self.ranks,
                    normalizes(type(self._optimizer)))
        if self._options is not self.step_ahead.scheme:
            core.set_density(self._options.density)
        return core

    # What plugin, state and reports need.

    @property
    def report(self) -> StepReport | None:
        """Of the last exchange that was applied; None before."""
        return None if self.core is None else self.core.report

    @property
    def options(self) -> Scheme:
        """The scheme, with its present density."""
        return self._options

    def set_density(self, density: float | None) -> None:
        """See FlatReducer.set_density."""
        self._options = self._options.with_density(density)
        if self.core is not None:
            self.core.set_density(density)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See shared_parameters."""
        with ExitStack() as stack:
            if self.core is not None:
                stack.enter_context(self.core.shared())
            yield
        if self._waiting:
            self._laid_out().resume()

    def records(self) -> list[Record]:
        """This rank's state, for a checkpoint; empty before the first step."""
        if self.core is None:
            return self._waiting
        if self.core.is_started and not self.core.is_swapped and not self._has_warned:
            self._has_warned = True
            logger.warning("optimizer.state_dict() outside of shared_parameters(optimizer): there the model holds "
                           "rank %d's own parameters: save the model and the optimizer inside",
                           self.ranks.membership()[0])
        record = self.core.record()
        return [] if record is None else [record]

    def load_records(self, records: list[Record]) -> None:
        """Takes what `records` gave, on these or other ranks."""
        if self.core is None:
            self._waiting = records
        else:
            self.core.load(records)

    def suspend(self) -> None:
        """See StepAheadReducer.suspend of the core."""
        if self.core is not None:
            self.core.suspend()


def _extended(record: Record | None, layout: TorchLayout) -> Record:
    """A record of some of the parameters, as one of all: the others have no residual."""
    assert record is not None
    lengths = [int(np.prod(shape, dtype=np.int64)) for _, shape in record["parameters"]]
    parts = np.split(record["residual"], np.cumsum(lengths)[:-1])
    known = {name: part for (name, _), part in zip(record["parameters"], parts, strict=True)}
    residual = [known.get(name, np.zeros(p.numel(), layout.dtype))
                for (name, *_), p in zip(layout.entries, layout.parameters, strict=True)]
    return {**record, "parameters": parameters_of(layout), "residual": np.concatenate(residual), "shared": None,
            "algorithm": {"step": record["algorithm"]["step"]}}
