"""The run of a distributed optimizer: its steps, and the parameters that they are for."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import is_
from typing import Any, NoReturn

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.make import kind_of, with_scheme
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.state import gather
from horovod_oktopk.state.records import Record, extended
from horovod_oktopk.torch_base.device import make_torch_mode
from horovod_oktopk.torch_base.hyperparameters import Hyperparameters, rates_of, scaled_learning_rates
from horovod_oktopk.torch_base.peers import MakePeers, Peers
from horovod_oktopk.torch_base.private import makes_state_alone, values_of
from horovod_oktopk.torch_base.registry import release
from horovod_oktopk.torch_base.tensors import (
    OwnGradients,
    Parameters,
    TorchLayout,
    gradients_are_finite,
    without_scaler,
)

logger = logging.getLogger("horovod_oktopk")

UNSCALE_FIRST = ("the gradients were reduced while they held the loss scale, which each rank has for itself. Write: "
                 "scaler.unscale_(optimizer); optimizer.synchronize(); with optimizer.skip_synchronize(): "
                 "scaler.step(optimizer); or scaler.step(optimizer) alone")
TWICE = ("optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
         "gradients are reduced twice. Write: with optimizer.skip_synchronize(): optimizer.step()")
NARROW = ("the gradient of '{name}' is float16, where small elements vanish as the loss scale is taken out, before "
          "they are added to what was not sent. Keep float32 parameters, with torch.autocast; or use bfloat16 "
          "without GradScaler")
OF_HOST = ("gradient of {name}, which the ranks of a host reduce before the step (give all of them the same ones): "
           "shape {shape}, {kind}")
JOINING = "go on with other parameters than before: {names}"
NEVER_STEPPED = ("gradients were cleared %d times, and optimizer.step() was never called: only step() exchanges "
                 "anything, and other methods (first_step and second_step, say) train each rank for itself. Call "
                 "step()")
CLEARED = 100
"""Calls of zero_grad before the first step, after which a warning says that nothing is exchanged."""
OUTSIDE = ("optimizer.state_dict() outside of shared_parameters(optimizer): there the model holds rank %d's own "
           "parameters: save the model and the optimizer inside")


class Run:
    """The part of a distributed optimizer that belongs to this rank, beside the plain class.

    The names are the parameters', and `local` is the optimizer's own step. `mode` is None before the first step,
    which tells what the gradients are like. A derived class is for one mode (runs.py).
    """

    strides_matter = False
    """True if a parameter must lie in memory as it did at first."""

    def __init__(self, optimizer: Any, local: Callable[..., Any], options: Any, names: Mapping[torch.Tensor, str],
                 average: bool, sparse_as_dense: bool, make_peers: MakePeers) -> None:
        self.optimizer, self.local, self.average = optimizer, local, average
        self.scheme: Scheme = getattr(options, "scheme", options)
        """With the present density."""
        self.kind = kind_of(options)
        self.peers = make_peers(*self.kind.channel(options))
        self.ranks = self.peers.ranks
        self.mode: Mode[Any] | None = None
        self.layout: TorchLayout  # the mode's
        self.reduces = True  # but inside skip_synchronize
        self.parameters = Parameters(optimizer, names)
        self._options, self._sparse_as_dense = options, sparse_as_dense
        self.excluded: list[torch.Tensor] = []  # whose gradients the library reduces itself, as they are sparse
        self._present: list[torch.Tensor] = []  # all of the optimizer's, as of the last step; see `current_mode`
        self._frozen: list[torch.Tensor] = []  # those of them that were not trained
        self._has_stepped, self._cleared = False, 0  # how often gradients were cleared before the first step
        self.waiting: list[Record] = []  # loaded before the first step
        self.carries_residuals = True  # in state_dict and load_state_dict
        self.reduced: dict[torch.Tensor, torch.Tensor] = {}  # by parameter; gradients that are to be applied
        self._has_warned = False
        self.hyperparameters: Hyperparameters

    # A step.

    def note_cleared(self) -> None:
        """Take note that gradients are cleared; warn if no step comes between."""
        self.reduced = {}
        if not self._has_stepped:
            self._cleared += 1
            if self._cleared == CLEARED:
                logger.warning(NEVER_STEPPED, CLEARED)

    def step(self) -> Any:
        """Take the optimizer's steps that follow from this rank's gradients.

        One that is only to make the optimizer's state is a plain step: it exchanges nothing, and moves nothing.
        """
        return self.local() if makes_state_alone(self.optimizer) else self.take_step()

    def take_step(self) -> Any:
        """Take a step of training; see `step`."""
        self._has_stepped = True
        with without_scaler(self.optimizer) as scale:
            if scale is not None:
                self._unscale(scale)
            if not self.ranks.takes_part:
                return self.local() if scale is None or gradients_are_finite(self.parameters.all()) else None
            if self.reduces:
                if self.is_reduced:
                    warnings.warn(TWICE, stacklevel=4)
                self.reduce()
            else:
                self.check_reduced()
            result = self._take_local_steps(scale is not None)
            self.reduced = {}  # not before: a step that fails, and is tried again, would reduce them twice unseen
            return result

    def _take_local_steps(self, scaled: bool) -> Any:
        """Take as many of the optimizer's own steps as the mode says: one, none, or one for each round."""
        mode = self.mode_of_step()
        if mode is None:  # skip_synchronize() before any synchronize()
            return self.local()
        gradients, result = self.gradients(), None
        for _ in range(mode.begin(gradients, self.settings(), scaled)):
            with (self.hyperparameters.set_to(mode.prepare(gradients)),
                  scaled_learning_rates(self.optimizer, mode.coefficient, mode.gain)):
                result = self.local()
        mode.end()
        return result

    def mode_of_step(self) -> Mode[Any] | None:
        """Return the mode that says how many steps follow; None if the gradients at hand were never reduced."""
        return self.current_mode()

    def gradients(self) -> OwnGradients:
        """Return the gradients as the mode takes them."""
        return OwnGradients(self.layout)

    def settings(self) -> Sequence[float]:
        """Return the hyperparameters that travel with the gradients."""
        return ()

    def reduce(self) -> None:
        """Reduce the gradients over this host's ranks if it is one worker of the mode's, before the step."""
        self.reduced = {}
        if self._host_peers is not None:
            if not self.parameters.reduce_all(self._host_peers, self.average, self._sparse_as_dense):
                self._refuse_host()
            self.note_reduced()

    def _refuse_host(self) -> NoReturn:
        """Raise AgreementError on all ranks: those of this host cannot reduce their gradients together."""
        mode = self.mode or self.current_mode()
        mode.refuse_step("\n".join(
            OF_HOST.format(name=name, shape=tuple(p.shape), kind="none" if p.grad is None else p.grad.layout)
            for name, p in self.parameters.by_name(self.parameters.all()).items() if p.requires_grad))

    def note_reduced(self) -> None:
        """Take note that the gradients at hand are reduced; see `is_reduced`."""
        self.reduced = {p: p.grad for p in self.parameters.all() if p.grad is not None}

    @cached_property
    def _host_peers(self) -> Peers | None:
        """The ranks of a host that is one worker; None if a worker is a rank. Collective at first."""
        scheme = self.scheme
        return self.peers.on_host(scheme.transport, scheme.hierarchical) if scheme.hierarchical else None

    @property
    def is_reduced(self) -> bool:
        """True if the gradients are surely reduced, and not applied or dropped since.

        Others in their place may be of a new backward pass; or the program has changed them, for `reduced` to tell.
        """
        return any(p.grad is gradient for p, gradient in self.reduced.items())

    def _unscale(self, scale: torch.Tensor | bool) -> None:
        self.kind.check("scaler")
        if isinstance(scale, bool):
            self.check_unscaled()
            return
        if self.is_reduced:
            raise PluginError(UNSCALE_FIRST)
        inverse, scaled = 1 / float(scale), {p: p.grad for p in self.parameters.all() if p.grad is not None}
        narrow = next((p for p, gradient in scaled.items() if gradient.dtype is torch.float16), None)
        if narrow is not None:
            raise PluginError(NARROW.format(name=self.parameters.name_of(narrow)))
        for gradient in scaled.values():
            values_of(gradient).mul_(inverse)

    def check_reduced(self) -> None:
        """Warn if a step inside skip_synchronize is to apply gradients that are this rank's own by mistake."""

    def check_unscaled(self) -> None:
        """Raise PluginError if gradients must not have been unscaled by now."""

    # Which parameters.

    def current_mode(self) -> Mode[Any]:
        """Return the mode of the parameters that are trained: a new one at first, and if others are trained now.

        Tell the learning rates; refuse the step if a parameter has changed. Collective if others are trained now.
        """
        mode, present = self.mode, self.parameters.all()
        if mode is not None:
            is_as_before = len(present) == len(self._present) and all(map(is_, present, self._present))
            if is_as_before and not any(p.requires_grad for p in self._frozen):
                self._check_unchanged(mode)
                return mode
        known = {*self.layout.parameters, *self.excluded} if mode is not None else set()
        trained = [p for p in present if p.requires_grad or p in known]
        if mode is not None:
            names = [*self.parameters.by_name([p for p in trained if p not in known])]
            if known == set(trained) or not self.joins(mode, names):
                self._note_present(present, trained)
                return mode
        before = self.layout.parameters if mode is not None else []
        self.mode = self._make_mode(trained)
        self._note_present(present, trained)  # not before: a step that fails is to be refused again
        if mode is not None:
            kept = set(present)
            release([p for p in before if p not in kept], self.optimizer)
            theirs = [self.parameters.name_of(p) if p in kept else None for p in before]
            self.waiting = [extended(each, theirs, self.layout) for each in mode.records()]
        if self.waiting:
            self.mode.load(self.waiting)
            self.waiting = []
        return self.mode

    def _note_present(self, present: list[torch.Tensor], trained: list[torch.Tensor]) -> None:
        kept = set(trained)
        self._present, self._frozen = present, [p for p in present if p not in kept]

    def joins(self, mode: Mode[Any], names: list[str]) -> bool:
        """Meet the other ranks, which are to go on with the same parameters; return True if a new mode is needed.

        The names are those of the parameters that are trained from now on, and were not before.
        """
        with mode.meeting(JOINING.format(names=", ".join(names) or "fewer")):
            mode.suspend()
        return True

    def exchanged(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return those that the mode exchanges; the library reduces the others' gradients, as they are sparse."""
        sparse = {*self.excluded} & {*parameters}
        sparse |= {p for p in parameters if p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense}
        if sparse:
            self.kind.check("sparse")
        self.excluded = list(self.parameters.by_name(list(sparse)).values())
        return [p for p in parameters if p not in sparse]

    def _make_mode(self, parameters: Sequence[torch.Tensor]) -> Mode[Any]:
        parameters = self.exchanged(parameters)
        self.peers.check(parameters)
        self.hyperparameters = Hyperparameters(self.optimizer)
        compared = {*self.layout.parameters} if self.mode is not None else ()
        layout = TorchLayout(self.parameters.by_name(parameters), compared)
        mode = make_torch_mode(with_scheme(self._options, self.scheme), self.average, layout, self.ranks,
                               type(self.optimizer), self.hyperparameters.names)
        mode.belongs_to(self)
        mode.reduction.tell_rates(rates_of(self.optimizer))
        self.layout = layout
        return mode

    def _check_unchanged(self, mode: Mode[Any]) -> None:
        """Refuse a step of parameters that have changed; tell the other ranks the learning rates."""
        mode.reduction.tell_rates(rates_of(self.optimizer))
        message = self.layout.changed(self.strides_matter)
        if message is not None:
            mode.refuse_step(message)

    # What shared_parameters, states and reports need; see Owner.

    def reports(self) -> list[StepReport]:
        return [] if self.mode is None or self.mode.report is None else [self.mode.report]

    def set_density(self, density: float | None) -> None:
        self.scheme = self.scheme.with_density(density)
        if self.mode is not None:
            self.mode.set_density(density)

    def catch_up(self) -> None:
        if self.mode is not None:
            self.mode.catch_up()

    def synchronize_replicas(self) -> None:
        """See Owner; replicas are equal."""

    def shared(self) -> AbstractContextManager[None]:
        return nullcontext() if self.mode is None else self.mode.shared()

    def suspend(self, for_another: bool = False) -> None:
        if self.mode is not None:
            self.mode.suspend(for_another)

    def warn_if_overwritten(self) -> None:
        """Warn if the program has written over what is this rank's own; with most modes nothing is."""

    def warn_if_frozen(self) -> None:
        """Warn if a parameter that holds this rank's own values was frozen; with most modes none does."""

    def records(self) -> list[Record]:
        """Return this rank's state for a checkpoint; before the first step, a loaded state that waits, or nothing."""
        if self.mode is None:
            return self.waiting
        if self.mode.holds_own and not self._has_warned:
            self._has_warned = True
            logger.warning(OUTSIDE, self.ranks.membership().rank)
        return self.mode.records()

    def load(self, records: list[Record], part: Record | None) -> None:
        """Take a loaded state, of which `part` is this rank's; before the first step there is none, and it waits."""
        self.reduced = {}
        if self.mode is None or part is None:
            self.waiting = records
        else:
            self.mode.restore(part)

    def gathered(self, doing: str) -> list[Record]:
        """Return the states of all ranks on rank 0, this rank's own elsewhere. `doing` says why. Collective."""
        if not self.ranks.takes_part:
            return self.records()
        if self.mode is not None:
            return gather.records(self.mode, doing)
        own = self.ranks.membership().rank
        found = {each["rank"]: each for records in self.peers.objects(self.waiting) for each in records}
        return [each for rank, each in sorted(found.items()) if rank == own or own == 0]
