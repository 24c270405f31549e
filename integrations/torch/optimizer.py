"""Distributed optimizers: the user's own objects, with a class of their own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.make import kind_of, with_scheme
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.state import gather
from horovod_oktopk.state.records import Record, parameters_of
from horovod_oktopk.torch.device import mode_of
from horovod_oktopk.torch.private import SUPPORTS_SCALING, values_of
from horovod_oktopk.torch.registry import RUN, add, hand_over
from horovod_oktopk.torch.tensors import (
    DenseGradients,
    Hyperparameters,
    OwnGradients,
    Parameters,
    TorchLayout,
    are_finite,
    ranks_of,
    scaled_learning_rates,
    without_rows,
    without_scaler,
)

logger = logging.getLogger("horovod_oktopk")

UNSCALE_FIRST = ("the gradients were reduced while they held the loss scale, which each rank has for itself. Write: "
                 "scaler.unscale_(optimizer); optimizer.synchronize(); with optimizer.skip_synchronize(): "
                 "scaler.step(optimizer); or scaler.step(optimizer) alone")
NOT_REDUCED = ("a GradScaler has unscaled gradients that are not reduced, and to clip them on each rank would give "
               "other gradients than to clip their mean. Write: scaler.unscale_(optimizer); optimizer.synchronize(); "
               "clip; with optimizer.skip_synchronize(): scaler.step(optimizer); or scaler.step(optimizer) alone")
TWICE = ("optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
         "gradients are reduced twice. Write: with optimizer.skip_synchronize(): optimizer.step()")
COPIED = ("a copy of a distributed optimizer cannot take steps: make a plain optimizer of the copied model's "
          "parameters, load the state into it, and give that to hvd.DistributedOptimizer")
DENSE_NOW = ("the gradient of '{name}' was sparse at the first step and is dense now; what is sparse at first must "
             "stay so. Give sparse_as_dense=True")
JOINED = ("'{name}' has come to the optimizer, or was unfrozen, after its first step: the ranks would go on with "
          "gradients of their own. Make the optimizer anew: hvd.DistributedOptimizer(optimizer, ...)")
OUTSIDE = ("optimizer.state_dict() outside of shared_parameters(optimizer): there the model holds rank %d's own "
           "parameters: save the model and the optimizer inside")


class Run:
    """The part of a distributed optimizer that belongs to this rank, beside the plain class.

    names: of the parameters. local: the optimizer's own step. mode: None before the first step, which tells what the
    gradients are like.
    """

    def __init__(self, optimizer: Any, local: Callable[..., Any], options: Any, names: Mapping[torch.Tensor, str],
                 op: Any, sparse_as_dense: bool, process_set: Any) -> None:
        self.optimizer, self.local, self.op = optimizer, local, op
        self.scheme: Scheme = getattr(options, "scheme", options)
        """With the present density."""
        self.kind = kind_of(options)
        self.ranks = ranks_of(process_set, self.kind.acts_at_step,
                              self.kind.acts_at_step and getattr(options, "overlap", True))
        self.mode: Mode | None = None
        self.layout: TorchLayout  # the mode's
        self.reduces = True  # but inside skip_synchronize
        self.parameters = Parameters(optimizer, names, op)
        self._options, self._sparse_as_dense = options, sparse_as_dense
        self._excluded: list[torch.Tensor] = []  # whose gradients Horovod reduces itself, as they are sparse
        self._waiting: list[Record] = []  # loaded before the first step
        self._reduced: torch.Tensor | None = None  # a gradient that was reduced, and is to be applied
        self._has_warned = False
        self._hyperparameters: Hyperparameters

    # A step.

    def step(self) -> Any:
        """Take the optimizer's steps that follow from this rank's gradients."""
        with without_scaler(self.optimizer) as scale:
            if scale is not None:
                self._unscale(scale)
            if not self.ranks.takes_part:
                own = OwnGradients(TorchLayout(self.parameters.by_name(self.parameters.all())))
                return self.local() if scale is None or own.all_finite() else None
            if self.reduces:
                if self.is_reduced and not self.kind.has_rounds:
                    warnings.warn(TWICE, stacklevel=3)
                self.reduce()
            self._reduced = None
            return self._take_local_steps(scale is not None)

    def _take_local_steps(self, scaled: bool) -> Any:
        """Take as many of the optimizer's own steps as the mode says: one, none, or one for each round."""
        mode = self._laid_out() if self.kind.acts_at_step else self.mode
        if mode is None:  # skip_synchronize() before any synchronize()
            return self.local()
        if not mode.is_started:
            hand_over(self.parameters.all(), self)
        settings = self._hyperparameters.read() if mode.has_rounds else ()
        gradients = DenseGradients(self.layout) if mode.has_rounds else OwnGradients(self.layout)
        result = None
        for _ in range(mode.begin(gradients, settings, scaled)):
            with (self._hyperparameters.set_to(mode.prepare(gradients)),
                  scaled_learning_rates(self.optimizer, mode.coefficient, mode.gain)):
                result = self.local()
        mode.end()
        return result

    def reduce(self) -> None:
        """Reduce the gradients, if the mode does so before the step; over a host's ranks if hosts are its workers."""
        self._reduced = None
        if self.kind.acts_at_step:
            if self._host_set is None:
                return
            self.parameters.reduce_all(self._host_set, self._sparse_as_dense)
        else:
            mode = self._laid_out()
            for p in self._excluded:
                if p.grad is None:
                    p.grad = without_rows(p)
                elif not p.grad.is_sparse:
                    mode.refuse_step(DENSE_NOW.format(name=self.parameters.name_of(p)))
            mode.reduce(DenseGradients(self.layout, bool(self.scheme.hierarchical)),
                        are_finite(lambda: (values_of(p.grad) for p in self._excluded if p.grad is not None)))
            self.parameters.reduce_sparse(self._excluded, self.ranks.process_set)
        self._reduced = next((p.grad for p in self.parameters.all() if p.grad is not None), None)

    @cached_property
    def _host_set(self) -> Any:
        """Horovod's process set of a host that is one worker; None if a worker is a rank. Collective at first."""
        scheme = self.scheme
        return self.ranks.host_set(scheme.transport, scheme.hierarchical) if scheme.hierarchical else None

    @property
    def is_reduced(self) -> bool:
        """True if the gradients are reduced, and not applied or dropped since."""
        return self._reduced is not None and any(p.grad is self._reduced for p in self.parameters.all())

    def _unscale(self, scale: torch.Tensor | bool) -> None:
        self.kind.check("scaler")
        if isinstance(scale, bool):
            if not self.is_reduced and not self.kind.acts_at_step and self.ranks.takes_part:
                raise PluginError(NOT_REDUCED)
            return
        if self.is_reduced:
            raise PluginError(UNSCALE_FIRST)
        inverse = 1 / float(scale)
        for p in self.parameters.all():
            if p.grad is not None:
                values_of(p.grad).mul_(inverse)

    # Which parameters.

    def _laid_out(self) -> Mode:
        """Return the mode of the present parameters: a new one at first, and with StepAhead if some have joined."""
        mode, count = self.mode, len(self.parameters.all())
        if mode is not None and not (mode.reads_memory and len(self.layout.parameters) != count):
            self._check_unchanged(mode)
            return mode
        self.mode = self._make_mode()
        if mode is not None:
            mode.suspend()
            self._waiting = [_extended(each, self.layout) for each in mode.records()]
        if self._waiting:
            self.mode.load(self._waiting)
            self._waiting = []
        return self.mode

    def _make_mode(self) -> Mode:
        parameters = self.parameters.all()
        if not self.kind.reads_memory:
            parameters = [p for p in parameters if p.requires_grad]
            sparse = {p for p in parameters if p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense}
            if sparse:
                self.kind.check("sparse")
            self._excluded = list(self.parameters.by_name(list(sparse)).values())
            parameters = [p for p in parameters if p not in sparse]
        self._hyperparameters = Hyperparameters(self.optimizer)
        layout = TorchLayout(self.parameters.by_name(parameters))
        mode = mode_of(with_scheme(self._options, self.scheme), self.op == hvd.Average, layout, self.ranks,
                       type(self.optimizer), self._hyperparameters.names)
        mode.belongs_to(self)
        self.layout = layout
        return mode

    def _check_unchanged(self, mode: Mode) -> None:
        message = self.layout.changed(strides=mode.reads_memory)
        if message is None and not mode.reads_memory:
            known = {*self.layout.parameters, *self._excluded}
            joined = next((p for p in self.parameters.all() if p.requires_grad and p not in known), None)
            message = None if joined is None else JOINED.format(name=self.parameters.name_of(joined))
        if message is not None:
            mode.refuse_step(message)

    # What shared_parameters, states and reports need; see Owner.

    def reports(self) -> list[StepReport]:
        return [] if self.mode is None or self.mode.report is None else [self.mode.report]

    def set_density(self, density: float | None) -> None:
        self.scheme = self.scheme.with_density(density)
        if self.mode is not None:
            self.mode.set_density(density)

    def synchronize_replicas(self) -> None:
        """Serve rounds until all ranks are here, and apply them as they end; see Owner."""
        if not self.kind.has_rounds or not self.ranks.takes_part:
            return
        mode = self._laid_out()
        kept = {p: p.grad for p in self.layout.parameters}
        for p in kept:
            p.grad = None  # or updates would be written over it
        gradients = DenseGradients(self.layout)
        for count in mode.synchronize():
            for _ in range(count):
                with self._hyperparameters.set_to(mode.prepare(gradients)):
                    self.local()
        for p, gradient in kept.items():
            p.grad = gradient
        if mode.drifts and self.layout.parameters:
            hvd.grouped_allreduce_([p.data for p in self.layout.parameters], op=hvd.Average,
                                   name="horovod_oktopk.models", process_set=self.ranks.process_set)

    @contextmanager
    def shared(self) -> Iterator[None]:
        with nullcontext() if self.mode is None else self.mode.shared():
            yield
        if self._waiting and self.kind.reads_memory:
            self._laid_out().resume()

    def suspend(self) -> None:
        if self.mode is not None:
            self.mode.suspend()

    def records(self) -> list[Record]:
        """Return this rank's state for a checkpoint; before the first step, a loaded state that waits, or nothing."""
        if self.mode is None:
            return self._waiting
        if self.mode.holds_own and not self._has_warned:
            self._has_warned = True
            logger.warning(OUTSIDE, self.ranks.membership().rank)
        return self.mode.records()

    def load_records(self, records: list[Record]) -> None:
        """Take what `records` gave, on these or other ranks."""
        self._reduced = None
        if self.mode is None:
            self._waiting = records
        else:
            self.mode.load(records)

    def gathered(self, doing: str) -> list[Record]:
        """Return the states of all ranks on rank 0, this rank's own elsewhere. Collective. doing: in words."""
        if not self.ranks.takes_part:
            return self.records()
        if self.mode is not None:
            return gather.records(self.mode, doing)
        own, process_set = self.ranks.membership().rank, self.ranks.process_set
        everyone = [hvd.broadcast_object(self._waiting, root, "horovod_oktopk.waiting", process_set)
                    for root in process_set.ranks or range(hvd.size())]
        found = {each["rank"]: each for records in everyone for each in records}
        return [each for rank, each in sorted(found.items()) if rank == own or own == 0]


def _extended(record: Record, layout: TorchLayout) -> Record:
    """Return a record of some of the parameters as one of all: the others have no residual."""
    lengths = [int(np.prod(shape, dtype=np.int64)) for _, shape in record["parameters"]]
    parts = np.split(record["residual"], np.cumsum(lengths)[:-1])
    known = {name: part for (name, _), part in zip(record["parameters"], parts, strict=True)}
    residual = [known.get(name, np.zeros(p.numel(), layout.dtype))
                for (name, *_), p in zip(layout.entries, layout.parameters, strict=True)]
    return {**record, "parameters": parameters_of(layout), "residual": np.concatenate(residual), "shared": None,
            "algorithm": {"step": record["algorithm"]["step"]}}


class _Distributed(torch.optim.Optimizer):
    """The members that the class of a distributed optimizer has beside those of the plain class."""

    __module__ = "horovod.torch.optimizer"  # so that hvd.broadcast_optimizer_state takes the plain step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a distributed step. A closure is evaluated once, before it, and its loss is returned."""
        run = _run(self)
        if closure is None:
            return run.step()
        run.kind.check("closure")
        with torch.enable_grad():
            loss = closure()
        run.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # else PyTorch would wrap it again, and run users' hooks twice

    def synchronize(self) -> None:
        """Reduce the gradients now, to be clipped; the step follows inside skip_synchronize()."""
        run = _run(self)
        run.kind.check("synchronize")
        if run.ranks.takes_part:
            run.reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Take a step inside without reducing gradients."""
        run = _run(self)
        run.kind.check("synchronize")
        run.reduces = False
        try:
            yield
        finally:
            run.reduces = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accept Horovod's number: a step reduces what all passes before it have added up."""


def _run(optimizer: Any) -> Run:
    run: Run | None = vars(optimizer).get(RUN)
    if run is None:
        raise PluginError(COPIED)
    return run


def distribute(optimizer: Any, options: Any, names: Mapping[torch.Tensor, str], op: Any, sparse_as_dense: bool,
               process_set: Any) -> None:
    """Give the optimizer a class of its own, whose steps are distributed."""
    plain = type(optimizer)
    # What a scheduler or Accelerate has put on the object is its own step.
    local = vars(optimizer).pop("step", None) or plain.step.__get__(optimizer)
    run = Run(optimizer, local, options, names, op, sparse_as_dense, process_set)
    # The members are copied, as Horovod asks the next class for the plain step.
    optimizer.__class__ = type(plain.__name__, (plain,), {**vars(_Distributed), "__doc__": plain.__doc__,
                                                          SUPPORTS_SCALING: True})
    hand_over(run.parameters.all())
    add(optimizer, run)
