"""The gradients in groups, each reduced as soon as all of it is ready: one group, or several where
`bucket_bytes` is given, so that a group crosses the network while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ..core.accumulator import Accumulator
from ..core.sparse import Values
from ..options import Algorithm
from .layout import Layout

L = TypeVar("L", bound=Layout)


@dataclass
class Group(Generic[L]):
    """Gradients that are reduced together: a flat vector with a residual and thresholds of its own.

    members: their indices in the layout of all gradients, ascending. layout: of these alone.
    """

    members: tuple[int, ...]
    layout: L
    accumulator: Accumulator
    algorithm: Algorithm


def cut(layout: Layout, order: Sequence[int], bucket_bytes: int | str | None) -> list[tuple[int, ...]]:
    """The gradients of each group, in the order of their reduction; one group where bucket_bytes is no number.

    order: the gradients in the order in which they become ready. A group is closed by the gradient with which it
    reaches bucket_bytes; at least one group is given.
    """
    if bucket_bytes is None or isinstance(bucket_bytes, str):
        return [tuple(range(len(layout.entries)))]
    lengths = np.diff(layout.offsets) * layout.dtype.itemsize
    groups: list[list[int]] = [[]]
    for index in order:
        if lengths[groups[-1]].sum() >= bucket_bytes:
            groups.append([])
        groups[-1].append(index)
    return [tuple(sorted(group)) for group in groups]


def read_residual(groups: Sequence[Group[L]], layout: Layout) -> Values:
    """A copy of all groups' residuals, in the layout's order."""
    residual = np.empty(layout.n, layout.dtype)
    for group in groups:
        values = group.accumulator.read_residual()
        for index, start, stop in _places(group):
            residual[layout.offsets[index]:layout.offsets[index + 1]] = values[start:stop]
    return residual


def load_residual(groups: Sequence[Group[L]], layout: Layout, residual: Values) -> None:
    """Gives every group its part of a residual that is in the layout's order."""
    for group in groups:
        values = np.empty(group.layout.n, group.layout.dtype)
        for index, start, stop in _places(group):
            values[start:stop] = residual[layout.offsets[index]:layout.offsets[index + 1]]
        group.accumulator.load_residual(values)


def _places(group: Group[L]) -> list[tuple[int, int, int]]:
    """Every member, and where it lies in the group's vector."""
    offsets = group.layout.offsets.tolist()
    return list(zip(group.members, offsets[:-1], offsets[1:], strict=True))
