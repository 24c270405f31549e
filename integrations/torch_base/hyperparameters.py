"""The numbers of an optimizer's parameter groups, which a step changes for itself: learning rates, weight decay.

They are changed between the hooks of the step: hooks see and set the user's own numbers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from numbers import Real
from typing import Any

import torch

from horovod_oktopk.errors import OptionError, PluginError
from horovod_oktopk.modes.step_ahead.pace import is_one_of
from horovod_oktopk.torch_base.private import come_first

NO_RATE = ("{name} has no learning rate (lr) to be multiplied by StepAhead's coefficient and gain, {factor:g}; got "
           "{rate!r}: give StepAhead(..., ahead=1, gain=None)")
NO_HOOKS = ("the step of this {name} has run no hooks of PyTorch, so its numbers could not be changed for it, as the "
            "learning rate is by StepAhead: if the program has set `step` on the optimizer, put that into a class")

DECOUPLED = frozenset({"AdamW", "Adafactor", "Muon", "Lion", "Lamb", "LAMB", "Adan", "AdEMAMix", "SOAP", "Sophia",
                       "SophiaG"})
"""Optimizers whose weight decay goes by the learning rate, and is no part of the gradient, by the names of their
classes (`is_one_of`); others say so by one of SAYING."""
SAYING = ("decoupled_weight_decay", "weight_decouple", "decouple", "adam_w_mode")
"""Names of what tells that weight decay is decoupled: in a group, or an attribute."""
_hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose steps have run hooks: a call of theirs that runs none has left its step out."""


class Hyperparameters:
    """The numbers in an optimizer's parameter groups (learning rates, momentum and such).

    With Partial they travel with rounds: where ranks are at different steps, their schedules are as well. Numbers
    that steps change themselves (Prodigy's d, a counter) do not: all ranks take the steps of the same rounds.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._places = [(index, key, place) for index, group in enumerate(optimizer.param_groups)
                        for key, value in group.items() for place in _places(value)]
        self.names = [f"{index}.{key}" if place is None else f"{index}.{key}.{place}"
                      for index, key, place in self._places]
        self._of_steps: set[int] = set()  # which a step has changed, by their places in `names`

    def read(self) -> list[float]:
        """Return the present values, in the order of `names`."""
        groups = self._optimizer.param_groups  # others, once a state is loaded
        return [float(groups[index][key] if place is None else groups[index][key][place])
                for index, key, place in self._places]

    def set_to(self, values: Sequence[float]) -> AbstractContextManager[None]:
        """Return a context whose plain steps have these values; without any, the numbers stay as they are."""
        def change() -> Callable[[], None]:
            mine = self.read()
            self._write(values)
            given = self.read()

            def undo() -> None:
                self._of_steps |= {number for number, value in enumerate(self.read()) if value != given[number]}
                self._write(mine)

            return undo

        return in_plain_step(self._optimizer, change) if values else nullcontext()

    def _write(self, values: Sequence[float]) -> None:
        """Set the numbers, but those that steps change themselves."""
        for number, ((index, key, place), value) in enumerate(zip(self._places, values, strict=True)):
            if number in self._of_steps:
                continue
            group = self._optimizer.param_groups[index]
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            elif place is None:
                group[key] = int(value) if isinstance(group[key], int) and value.is_integer() else value
            else:
                group[key] = tuple(value if i == place else old for i, old in enumerate(group[key]))


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates of the groups that have one, but those that lie on a device."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [float(rate) for rate in rates if isinstance(rate, Real)
            or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu")]


def _places(value: Any) -> list[int | None]:
    """Return where the numbers of a group's entry lie: [None] for a number itself."""
    if isinstance(value, torch.Tensor):
        return [None] if value.numel() == 1 else []
    if isinstance(value, tuple):
        return list(range(len(value))) if all(isinstance(each, float) for each in value) else []
    return [None] if isinstance(value, int | float) and not isinstance(value, bool) else []


def scaled_learning_rates(optimizer: torch.optim.Optimizer, coefficient: float, gain: float,
                          ) -> AbstractContextManager[None]:
    """Return a context whose plain steps have learning rates times coefficient · gain, and decoupled decay / gain.

    So weight decay does what it would without a gain. Of Adafactor's rate it is the part that a step uses.
    Raise OptionError for an optimizer without learning rates.
    """
    factor = coefficient * gain
    if factor == gain == 1:
        return nullcontext()
    for rate in (group.get("lr") for group in optimizer.param_groups):
        if not isinstance(rate, Real | torch.Tensor):
            raise OptionError(NO_RATE.format(name=type(optimizer).__name__, factor=factor, rate=rate))

    def change() -> Callable[[], None]:
        given = []
        for group in optimizer.param_groups:
            used = _used(optimizer, group)
            changes = {"lr": factor * used}
            if "weight_decay" in group and _decays_by_rate(optimizer, group):
                changes["weight_decay"] = 1 / (gain * used)
            for name, times in changes.items():
                given.append((group, name, group[name]))
                group[name] = group[name] * times

        def undo() -> None:
            for group, name, value in given:
                group[name] = value

        return undo

    return in_plain_step(optimizer, change)


def _used(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Return the part of a group's learning rate that its next step uses: PyTorch's Adafactor takes min(lr, 1/√t).

    So it does of a rate that is multiplied, too: then λ times a gain counts up to 1.
    """
    if not isinstance(optimizer, getattr(torch.optim, "Adafactor", ())) or not group["lr"]:
        return 1.0
    taken = max((float(optimizer.state[p]["step"]) for p in group["params"] if optimizer.state.get(p)), default=0.0)
    return min(1.0, 1 / (math.sqrt(taken + 1) * float(group["lr"])))


def _decays_by_rate(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return True if a group's weight decay is decoupled, and has the learning rate as a factor."""
    if group.get("fixed_decay", getattr(optimizer, "fixed_decay", False)):  # AdaBelief's, without the rate
        return False
    said = [each for name in SAYING if isinstance(each := group.get(name, getattr(optimizer, name, None)), int)]
    return bool(said[0]) if said else is_one_of(DECOUPLED, type(optimizer))


@contextmanager
def in_plain_step(optimizer: torch.optim.Optimizer, change: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Have numbers changed while plain steps run inside: after the hooks before a step, before those after it.

    `change` changes the numbers, and returns a function that changes them back. Raise PluginError for an optimizer
    whose steps run no hooks.
    """
    undo = ExitStack()
    depth = 0  # a plain step may call its base's, which PyTorch surrounds with hooks as well

    def begin(*_: Any) -> None:
        nonlocal depth
        depth += 1
        _hooked.add(optimizer)
        if depth == 1:
            undo.callback(change())

    def end(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            undo.close()

    before = optimizer.register_step_pre_hook(begin)
    after = optimizer.register_step_post_hook(end)
    come_first(optimizer, after)
    try:
        yield
        if optimizer not in _hooked:
            raise PluginError(NO_HOOKS.format(name=type(optimizer).__name__))
    finally:
        before.remove()
        after.remove()
        undo.close()  # after a step that has failed
