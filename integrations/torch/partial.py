"""`compression=Partial(...)`: a step hands in its gradients, and applies the updates of all rounds since the last.

Every update is a step of the inner optimizer, with the learning rate that belongs to its round: so momentum and the
like are the same on all ranks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.partial.options import Partial
from horovod_oktopk.partial.outcomes import RoundUpdate
from horovod_oktopk.partial.reducer import PartialReducer as FlatPartialReducer
from horovod_oktopk.reducer.flat import Update
from horovod_oktopk.torch.accumulator import make_accumulator
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.reducer import Reducer
from horovod_oktopk.torch.registry import reducers_of
from horovod_oktopk.torch.transport import ranks_of


class PartialReducer(Reducer):
    """Takes the steps of one hvd.DistributedOptimizer; on every rank of its process set."""

    flat: FlatPartialReducer[TorchLayout] | None

    def __init__(self, optimizer: Any, options: Partial) -> None:
        super().__init__(optimizer, options.scheme)
        self.ranks = ranks_of(optimizer.process_set, own_channel=True, yield_cpu=True)
        self.partial = options
        self._hyperparameters: Hyperparameters
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._is_stepping = False

    def step(self, closure: Callable[[], Any] | None) -> None:
        """In place of Horovod's `step`: hands in the gradients, and applies what rounds there were."""
        if closure is not None:
            raise PluginError("step(closure) cannot be used with Partial, which applies several updates, or none")
        if not self._optimizer._should_synchronize:
            raise PluginError(IN_STEP_ONLY)
        self._is_stepping = True
        try:
            self._optimizer.synchronize()
        finally:
            self._is_stepping = False
        self._optimizer._synchronized = False
        assert self.flat is not None
        self._observe(self.flat)
        if self._changed:  # this rank alone raises: the others' rounds go on, and wait for it in the end
            raise PluginError(self._changed)
        pieces = self.flat.layout.pieces([self._gradients[p] for p in self.flat.layout.parameters])
        self._apply(self.flat.arrive(pieces, self._hyperparameters.read()))

    def synchronize_replicas(self) -> None:
        """Serves rounds until all ranks are here, and applies them as they end."""
        flat = self._laid_out()
        kept = {p: p.grad for p in flat.layout.parameters}
        for updates in flat.synchronize_replicas():
            self._apply(updates)
        for p, gradient in kept.items():
            p.grad = gradient
        if not self.partial.in_order and flat.layout.parameters:
            hvd.grouped_allreduce_([p.data for p in flat.layout.parameters], op=hvd.Average,
                                   name="horovod_oktopk.models", process_set=self.ranks.process_set)

    def check_handed_in(self) -> None:
        """Raises PluginError where gradients have not been handed in."""
        if self._pending:
            raise PluginError("synchronize_replicas: gradients have been computed, and not handed in: call "
                              "optimizer.step() before it")

    # What differs from a synchronous reduction.

    def set_density(self, density: float | None) -> None:
        """From this rank's next step on; see FlatPartialReducer."""
        self.options = self.options.with_density(density)
        if self.flat is not None:
            self.flat.set_density(density)

    def check_scaler(self) -> None:
        """Refuses: its scale would have to be one for all ranks, whose steps differ."""
        raise PluginError(IN_STEP_ONLY)

    def exclude(self, p: torch.Tensor) -> None:
        """Refuses sparse gradients, which would have to wait for all ranks."""
        raise PluginError(f"the gradient of '{self._optimizer._parameter_names[p]}' is sparse, and goes by Horovod's "
                          "own allgather, which waits for all ranks: with Partial give sparse_as_dense=True")

    def _begin_step(self) -> None:
        pass

    def _reduce(self) -> None:
        """Only takes the gradients: rounds follow in `step`."""
        gradients, self._pending = self._pending, {}
        if not self._is_stepping:
            raise PluginError(IN_STEP_ONLY)
        self._laid_out()
        self._gradients = gradients
        self._results.update(gradients)

    def _laid_out(self) -> FlatPartialReducer[TorchLayout]:
        if self.flat is None:
            self._lay_out()
        assert self.flat is not None
        return self.flat

    def _make_flat(self, layout: TorchLayout) -> FlatPartialReducer[TorchLayout]:
        self._hyperparameters = Hyperparameters(self._optimizer)
        options = replace(self.partial, inner=self.options)  # whose density may have been set
        flat = FlatPartialReducer(options, self._optimizer.op == hvd.Average, layout, make_accumulator,
                                  self.ranks, self._hyperparameters.names)
        flat.belongs_to(self)
        return flat

    # Updates.

    def _apply(self, updates: list[RoundUpdate]) -> None:
        assert self.flat is not None
        for each in updates:
            with self.flat.applying():
                self._write(each.update, self.flat.layout)
            with self._hyperparameters.set_to(each.settings):
                super(type(self._optimizer), self._optimizer).step()  # type: ignore[misc]

    def _write(self, update: Update, layout: TorchLayout) -> None:
        tensors = [self._gradients[p] if p in self._gradients else torch.empty_like(p) for p in layout.parameters]
        for p, gradient in zip(layout.parameters, layout.write(update, tensors), strict=True):
            p.grad = gradient


IN_STEP_ONLY = ("with Partial the gradients are handed in by optimizer.step(), which may apply several updates: "
                "synchronize() and skip_synchronize() cannot be used, nor a GradScaler")


def synchronize_replicas(*targets: Any) -> None:
    """Makes the replicas of a `Partial` optimizer equal.

    It is called on all ranks together: before evaluation, checkpoints and any collective
    of your own, and after the last step. A rank that is here serves the others' rounds until all are. Without
    `Partial` it does nothing.

    Args:
        *targets: optimizers that were made with `compression=Partial(...)`, or their models, or lists of these.

    Raises:
        PluginError: It was called between a backward pass and its step; or a target is neither an optimizer nor a
            model.

    Examples:
        >>> synchronize_replicas(optimizer)
    """
    reducers = [reducer for reducer in reducers_of("synchronize_replicas", *targets)
                if isinstance(reducer, PartialReducer)]
    for reducer in reducers:
        reducer.check_handed_in()
    for reducer in reducers:
        reducer.synchronize_replicas()


class Hyperparameters:
    """The numbers in an optimizer's parameter groups (learning rates, momentum and such), which travel with rounds:
    where ranks are at different steps, their schedules are as well."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._places = [(index, key, place) for index, group in enumerate(self._groups)
                        for key, value in group.items() for place in _places(value)]
        self.names = [f"{index}.{key}" if place is None else f"{index}.{key}.{place}"
                      for index, key, place in self._places]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups  # others, once a state is loaded
        return groups

    def read(self) -> list[float]:
        """Their present values, in the order of `names`."""
        values = (self._groups[index][key] if place is None else self._groups[index][key][place]
                  for index, key, place in self._places)
        return [float(value) for value in values]

    @contextmanager
    def set_to(self, values: Iterable[float]) -> Iterator[None]:
        """Inside they have these values."""
        mine = self.read()
        self._write(values)
        try:
            yield
        finally:
            self._write(mine)

    def _write(self, values: Iterable[float]) -> None:
        for (index, key, place), value in zip(self._places, values, strict=True):
            group = self._groups[index]
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            elif place is None:
                group[key] = int(value) if isinstance(group[key], int) and value.is_integer() else value
            else:
                group[key] = tuple(value if i == place else old for i, old in enumerate(group[key]))


def _places(value: Any) -> list[int | None]:
    """Where the numbers of a group's entry lie: [None] for a number itself; of others, there are none."""
    if isinstance(value, torch.Tensor):
        return [None] if value.numel() == 1 else []
    if isinstance(value, tuple):
        return list(range(len(value))) if all(isinstance(each, float) for each in value) else []
    return [None] if isinstance(value, int | float) and not isinstance(value, bool) else []
