"""The hyperparameters of an optimizer, while it takes a step that differs from the user's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod_oktopk.errors import OptionError

DECOUPLED = frozenset({"AdamW", "Adafactor", "Muon", "Lion"})
"""Optimizers whose weight decay goes by the learning rate, and is no part of the gradient, by the names of their
classes; others say so by `decoupled_weight_decay` in their groups."""


class Hyperparameters:
    """The numbers in an optimizer's parameter groups (learning rates, momentum and such).

    With Partial they travel with rounds: where ranks are at different steps, their schedules are as well.
    """

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
        """Return the present values, in the order of `names`."""
        values = (self._groups[index][key] if place is None else self._groups[index][key][place]
                  for index, key, place in self._places)
        return [float(value) for value in values]

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
            group = self._groups[index]
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
def lengthened(optimizer: torch.optim.Optimizer, coefficient: float, gain: float) -> Iterator[None]:
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
    names = [("lr", "weight_decay") if (group.get("decoupled_weight_decay") or by_name) and "weight_decay" in group
             else ("lr",) for group in groups]
    given = [{name: group[name] for name in own} for group, own in zip(groups, names, strict=True)]
    for group, own in zip(groups, given, strict=True):
        group["lr"] = own["lr"] * factor
        if "weight_decay" in own:
            group["weight_decay"] = own["weight_decay"] / gain
    try:
        yield
    finally:
        for group, own in zip(groups, given, strict=False):
            group.update(own)
