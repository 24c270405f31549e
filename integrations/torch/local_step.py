"""The optimizer's own step of step-ahead error feedback: its learning rate, and the gradients that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from horovod_oktopk.errors import OptionError
from horovod_oktopk.step_ahead.noise import Gather, elements_of_rows, gather_by_parts
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.vectors.sparse import Indices, Values

DECOUPLED = frozenset({"AdamW", "Adafactor", "Muon", "Lion"})
"""Optimizers whose weight decay goes by the learning rate, and is no part of the gradient, by the names of their
classes; others say so by `decoupled_weight_decay` in their groups."""


@contextmanager
def lengthened(optimizer: torch.optim.Optimizer, coefficient: float, gain: float) -> Iterator[None]:
    """Inside, learning rates are coefficient · gain times the user's, and decoupled weight decay is 1/gain of the
    user's: so it does what it would without a gain.

    Raises OptionError for an optimizer without learning rates.
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


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether all elements are."""
    values = [each._values() if each.is_sparse else each for each in gradients]
    if not values:
        return True
    total = torch.stack([each.sum(dtype=torch.float32).to(values[0].device) for each in values]).sum()
    # A sum is finite only if its terms are; it may overflow though they are.
    return bool(torch.isfinite(total)) or all(bool(torch.isfinite(each).all()) for each in values)


def gradient_elements(layout: TorchLayout, loss_scale: torch.Tensor | None) -> Gather:
    """Reads elements of the gradients, in the order of indices; zeros where there is none.

    loss_scale: what the gradients are to be divided by, where a fused optimizer does it by itself.
    """
    def gather(wanted: Indices) -> Values:
        found = gather_by_parts(wanted, layout.offsets,
                                lambda part, places: _elements(layout.parameters[part].grad, places))
        return found if loss_scale is None else found / float(loss_scale)

    return gather


def _elements(gradient: torch.Tensor | None, places: Indices) -> Values:
    if gradient is None:
        return np.zeros(len(places))
    if gradient.is_sparse:
        rows, values = gradient._indices()[0].cpu().numpy(), gradient._values()
        return elements_of_rows(rows, values.detach().cpu().numpy(), places)
    if gradient.device.type != "cpu":
        chosen: Values = torch.take(gradient.detach(), torch.from_numpy(places).to(gradient.device)).cpu().numpy()
        return chosen
    whole: Values = gradient.detach().numpy()
    found: Values = (whole.reshape(-1)[places] if whole.flags.c_contiguous
                     else whole[np.unravel_index(places, whole.shape)])
    return found
