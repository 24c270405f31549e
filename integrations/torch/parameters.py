"""The parameters and hyperparameters of one optimizer, and what is around its own step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

from horovod_oktopk.errors import OptionError


class Parameters:
    """The parameters of one optimizer, by their names, which fix the order on all ranks."""

    def __init__(self, optimizer: Any, names: Mapping[torch.Tensor, str], op: Any) -> None:
        self._optimizer, self._names, self._op = optimizer, names, op

    def all(self) -> list[torch.Tensor]:
        """Return all parameters, in the order of the optimizer's groups."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def name_of(self, p: torch.Tensor) -> str:
        """Return a parameter's name."""
        return self._names.get(p) or f"unnamed.{next(i for i, q in enumerate(self.all()) if q is p)}"

    def by_name(self, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return some parameters, in the order of their names."""
        named = {self.name_of(p): p for p in parameters}
        return {name: named[name] for name in sorted(named)}

    def reduce_sparse(self, parameters: Sequence[torch.Tensor], process_set: Any) -> None:
        """Reduce the sparse gradients of these parameters by Horovod, in this order. Collective."""
        handles = [hvd.sparse_allreduce_async(p.grad, name=self.name_of(p), op=self._op, process_set=process_set)
                   for p in parameters]
        for p, handle in zip(parameters, handles, strict=True):
            p.grad = handle()

    def reduce_all(self, process_set: Any, sparse_as_dense: bool) -> None:
        """Reduce the gradients of all trained parameters by Horovod; a missing one is zero. Collective."""
        trained = [p for p in self.by_name(self.all()).values() if p.requires_grad]
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse and sparse_as_dense:
                p.grad = p.grad.to_dense()
        sparse = [p for p in trained if p.grad is not None and p.grad.is_sparse]
        dense = [p.grad for p in trained if p.grad is not None and not p.grad.is_sparse]
        if dense:
            hvd.grouped_allreduce_(dense, op=self._op, name="horovod_oktopk.host", process_set=process_set)
        self.reduce_sparse(sparse, process_set)


DECOUPLED = frozenset({"AdamW", "Adafactor", "Muon", "Lion"})
"""Optimizers whose weight decay goes by the learning rate, and is no part of the gradient, by the names of their
classes; others say so by `decoupled_weight_decay` in their groups."""


class Hyperparameters:
    """The numbers in an optimizer's parameter groups (learning rates, momentum and such).

    With Partial they travel with rounds: where ranks are at different steps, their schedules are as well.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._places = [(index, key, place) for index, group in enumerate(optimizer.param_groups)
                        for key, value in group.items() for place in _places(value)]
        self.names = [f"{index}.{key}" if place is None else f"{index}.{key}.{place}"
                      for index, key, place in self._places]

    def read(self) -> list[float]:
        """Return the present values, in the order of `names`."""
        groups = self._optimizer.param_groups  # others, once a state is loaded
        return [float(groups[index][key] if place is None else groups[index][key][place])
                for index, key, place in self._places]

    @contextmanager
    def set_to(self, values: Sequence[float]) -> Iterator[None]:
        """Give the numbers these values inside; none: they stay as they are."""
        if not values:
            yield
            return
        mine = self.read()
        self._write(values)
        try:
            yield
        finally:
            self._write(mine)

    def _write(self, values: Sequence[float]) -> None:
        for (index, key, place), value in zip(self._places, values, strict=True):
            group = self._optimizer.param_groups[index]
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            elif place is None:
                group[key] = int(value) if isinstance(group[key], int) and value.is_integer() else value
            else:
                group[key] = tuple(value if i == place else old for i, old in enumerate(group[key]))


def _places(value: Any) -> list[int | None]:
    """Return where the numbers of a group's entry lie: [None] for a number itself."""
    if isinstance(value, torch.Tensor):
        return [None] if value.numel() == 1 else []
    if isinstance(value, tuple):
        return list(range(len(value))) if all(isinstance(each, float) for each in value) else []
    return [None] if isinstance(value, int | float) and not isinstance(value, bool) else []


@contextmanager
def scaled_learning_rates(optimizer: torch.optim.Optimizer, coefficient: float, gain: float) -> Iterator[None]:
    """Multiply learning rates by coefficient · gain inside, and decoupled weight decay by 1/gain.

    So weight decay does what it would without a gain. Raise OptionError for an optimizer without learning rates.
    """
    groups, factor = optimizer.param_groups, coefficient * gain
    if factor == gain == 1:
        yield
        return
    if not all("lr" in group for group in groups):
        raise OptionError(f"{type(optimizer).__name__} has no learning rate (lr) to be multiplied by "
                          f"StepAhead's coefficient and gain, {factor:g}: give StepAhead(..., ahead=1, gain=None)")
    by_name = any(cls.__name__ in DECOUPLED for cls in type(optimizer).__mro__)
    given = [(group, "lr", group["lr"]) for group in groups]
    given += [(group, "weight_decay", group["weight_decay"]) for group in groups
              if (group.get("decoupled_weight_decay") or by_name) and "weight_decay" in group]
    for group, name, value in given:
        group[name] = value * factor if name == "lr" else value / gain
    try:
        yield
    finally:
        for group, name, value in given:
            group[name] = value


@contextmanager
def without_scaler(optimizer: Any) -> Iterator[torch.Tensor | bool | None]:
    """Hide a GradScaler's attributes from the optimizer's own step.

    Yields the loss scale that gradients hold; True if they hold none, but a scaler takes the step; None without one.
    """
    found = {name: vars(optimizer).pop(name) for name in ("found_inf", "grad_scale") if name in vars(optimizer)}
    scale = found.get("grad_scale")
    yield (True if scale is None else scale) if "found_inf" in found else None
    vars(optimizer).update(found)  # GradScaler deletes them, but not after an error
