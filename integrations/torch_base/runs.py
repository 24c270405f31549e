"""The runs of each mode: what a distributed optimizer does beside what all of them do."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.gradient_mode import GradientMode
from horovod_oktopk.modes.make import Kind
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.modes.partial.mode import PartialMode
from horovod_oktopk.modes.step_ahead.messages import INSIDE
from horovod_oktopk.modes.step_ahead.mode import GAVE_WAY, StepAheadMode
from horovod_oktopk.state.records import Record
from horovod_oktopk.torch_base.private import versions_of
from horovod_oktopk.torch_base.registry import keep, release, runs_over
from horovod_oktopk.torch_base.run import Run
from horovod_oktopk.torch_base.tensors import DenseGradients, gradients_are_finite, without_rows

logger = logging.getLogger("horovod_oktopk")

NOT_REDUCED = ("a GradScaler has unscaled gradients that are not reduced, and to clip them on each rank would give "
               "other gradients than to clip their mean. Write: scaler.unscale_(optimizer); optimizer.synchronize(); "
               "clip; with optimizer.skip_synchronize(): scaler.step(optimizer); or scaler.step(optimizer) alone")
UNREDUCED = ("step() inside optimizer.skip_synchronize(), and the gradients are not reduced: each rank trains for "
             "itself. Call optimizer.synchronize() after backward(), before this step")
DENSE_NOW = ("the gradient of '{name}' was sparse at the first step and is dense now; what is sparse at first must "
             "stay so. Give sparse_as_dense=True")
JOINED = ("'{name}' has come to the optimizer, or was unfrozen, after its first step, which Partial cannot follow: "
          "the ranks would go on with gradients of their own. Give DistributedOptimizer a new plain optimizer of "
          "all parameters that are trained")
OVERWRITTEN = ("all parameters were written over after the optimizer's last step. That is a move of rank %d's own, "
               "as clipping weights is, and does not change those that all ranks share. So a load, of a best model "
               "say, is undone, and a broadcast drops what other ranks have not sent: load, broadcast, or make "
               "DistributedDataParallel anew inside `with shared_parameters(optimizer):`")

FROZEN = ("'%s' is frozen, and holds this rank's own values, as an optimizer with StepAhead has trained it: what is "
          "trained on top of it would learn from another one on each rank. Make the new optimizer and train inside "
          "`with shared_parameters(model):`, or give the new one these parameters too")


class GradientRun(Run):
    """Gradients are reduced, and then the optimizer takes its step."""

    def reduce(self) -> None:
        """Reduce the gradients: the mode those of its layout, the library sparse ones."""
        mode = self.current_mode()
        for p in self.excluded:
            if p.grad is None:
                p.grad = without_rows(p)
            elif not p.grad.is_sparse:
                mode.refuse_step(DENSE_NOW.format(name=self.parameters.name_of(p)))
        mode.reduce(DenseGradients(self.layout, bool(self.scheme.hierarchical)),
                    gradients_are_finite(self.excluded))
        self.parameters.reduce_sparse(self.excluded, self.peers, self.average)
        self.note_reduced()

    def mode_of_step(self) -> Mode[Any] | None:
        return self.mode

    def check_reduced(self) -> None:
        has_gradients = any(p.grad is not None for p in self.parameters.all())
        if has_gradients and not self.reduced and self.ranks.membership().size > 1:
            warnings.warn(UNREDUCED, stacklevel=5)

    def check_unscaled(self) -> None:
        if not self.reduced and self.ranks.takes_part:
            raise PluginError(NOT_REDUCED)


class StepAheadRun(Run):
    """The optimizer steps over this rank's own gradients; its moves of the parameters are exchanged afterwards."""

    strides_matter = True
    _is_open = False  # inside shared_parameters
    _was_loaded = False  # inside it, or before the first step
    _versions: Sequence[int] = ()  # of the parameters, after the last step or block
    _has_told = _has_told_frozen = False

    def exchanged(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return all: a step moves dense parameters, whatever their gradients are like."""
        return parameters

    def take_step(self) -> Any:
        """Take the optimizer's step; see Run. Inside `shared_parameters` none is taken."""
        if self._is_open:
            raise PluginError(INSIDE)
        self.warn_if_overwritten()
        result = super().take_step()
        self._note_versions()
        return result

    def mode_of_step(self) -> Mode[Any]:
        """Return the mode, which takes its turn if it starts with the step at hand."""
        mode = self.current_mode()
        if not mode.is_started:
            self._take_turn()
        return mode

    def _take_turn(self) -> None:
        """Suspend the other optimizers of these parameters, which keep this one until another takes its turn."""
        for other in runs_over(self.parameters.all()):
            if other is not self:
                other.suspend(for_another=True)
        keep(self.layout.parameters, self.optimizer)

    def _note_versions(self) -> None:
        self._versions = [] if self.mode is None else versions_of(self.layout.parameters)

    def warn_if_overwritten(self) -> None:
        """Warn once of a program that has written over all parameters since the last step or block, to load, say."""
        if self._has_told or not self._versions or self.mode is None or not self.mode.holds_own:
            return
        if all(map(operator.ne, self._versions, versions_of(self.layout.parameters))):
            self._has_told = True
            logger.warning(OVERWRITTEN, self.ranks.membership().rank)

    def warn_if_frozen(self) -> None:
        """Warn once, as something else may be trained on top of a parameter that was frozen."""
        if self.mode is None or not self.mode.holds_own or self._has_told_frozen:
            return
        frozen = [name for (name, *_), p in zip(self.layout.entries, self.layout.parameters, strict=True)
                  if not p.requires_grad]
        if frozen:
            self._has_told_frozen = True
            if self.ranks.membership().rank == 0:
                logger.warning(FROZEN, frozen[0])

    def suspend(self, for_another: bool = False) -> None:
        if for_another:
            self.warn_if_overwritten()
            self.waiting = [record | {"shared": GAVE_WAY} for record in self.waiting]
        super().suspend(for_another)
        if self.mode is not None:
            release(self.layout.parameters, self.optimizer)

    def load(self, records: list[Record], part: Record | None) -> None:
        super().load(records, part)
        self._was_loaded = self._is_open or self.mode is None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See Owner. If a state is loaded inside, it goes on at the end, if it had the parameters at last."""
        self.warn_if_overwritten()
        outer, self._is_open = self._is_open, True
        try:
            with super().shared():
                yield
        finally:
            self._is_open = outer
            self._note_versions()
        if self._was_loaded and not outer and self.ranks.takes_part:
            self._was_loaded = False
            self.current_mode().resume(self._take_turn)
            self._note_versions()


class PartialRun(Run):
    """Gradients are handed in, and the optimizer takes a step for each round, with the round's update."""

    def gradients(self) -> DenseGradients:
        return DenseGradients(self.layout)

    def settings(self) -> Sequence[float]:
        return self.hyperparameters.read()

    def joins(self, mode: Mode[Any], names: list[str]) -> bool:
        """Return False: rounds go on with fewer parameters, and not with more."""
        if names:
            mode.refuse_step(JOINED.format(name=names[0]))
        return False

    def synchronize_replicas(self) -> None:
        """Serve rounds until all ranks are here, and apply them as they end; see Owner."""
        if not self.ranks.takes_part:
            return
        mode = self.current_mode()
        kept = {p: p.grad for p in self.layout.parameters}
        for p in kept:
            p.grad = None  # or updates would be written over it
        gradients = self.gradients()
        for count in mode.synchronize():
            for _ in range(count):
                with self.hyperparameters.set_to(mode.prepare(gradients)):
                    self.local()
        for p, gradient in kept.items():
            p.grad = gradient
        if mode.drifts and self.layout.parameters:
            self.peers.reduce([p.data for p in self.layout.parameters], average=True)


RUNS: dict[Kind, type[Run]] = {GradientMode: GradientRun, StepAheadMode: StepAheadRun, PartialMode: PartialRun}
"""By the class of the mode."""
