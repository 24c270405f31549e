"""The gradients in groups, each reduced as soon as all of it is ready: one group, or several where
`bucket_bytes` is given, so that a group crosses the network while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..options import Algorithm, Scheme
from ..selection.accumulator import Accumulator
from ..vectors.sparse import Values
from .layout import Layout

L = TypeVar("L", bound=Layout)
Cuts = list[tuple[int, ...]]
"""The gradients of each group, ascending, in the order in which groups are reduced."""


@dataclass
class Group(Generic[L]):
    """Gradients that are reduced together: a flat vector with a residual and thresholds of its own.

    members: their indices in the layout of all gradients, ascending. layout: of these alone.
    """

    members: tuple[int, ...]
    layout: L
    accumulator: Accumulator
    algorithm: Algorithm


class Groups(Generic[L]):
    """All groups of a layout, in the order in which they are reduced.

    options: their scheme's. make_accumulator: for a group's layout.
    """

    def __init__(self, layout: L, options: Scheme, make_accumulator: Callable[[L], Accumulator], cuts: Cuts) -> None:
        self._layout = layout
        self._options = options
        self._make_accumulator = make_accumulator
        self._groups: list[Group[L]] = []
        self.cut(cuts)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group[L]]:
        return iter(self._groups)

    def __getitem__(self, index: int) -> Group[L]:
        return self._groups[index]

    def cut(self, cuts: Cuts) -> None:
        """Other groups, without residuals or state."""
        self._groups = []  # their memory is free before the new ones need it
        for members in cuts:
            part = self._layout.part(members)
            self._groups.append(Group(members, part, self._make_accumulator(part), self._options.scheme("")))

    @property
    def cuts(self) -> Cuts:
        """The members of each."""
        return [group.members for group in self._groups]

    def describe(self, index: int) -> list[str]:
        """A line that must be equal on all ranks, where there are several."""
        names = ", ".join(name for name, *_ in self._groups[index].layout.entries)
        return [f"group {index + 1} of {len(self)}: {names}"] if len(self) > 1 else []

    def state(self) -> dict[str, Any]:
        """The algorithms' state: plain numbers, strings and lists."""
        states = [{"members": list(group.members), **group.algorithm.state()} for group in self._groups]
        return {"step": states[0]["step"], "groups": states}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what `state` gave: of groups with the same members all, of others the step counter."""
        same = {tuple(group["members"]): group for group in state.get("groups", ())}
        for group in self._groups:
            group.algorithm.forget()
            group.algorithm.step = state["step"]
            if group.members in same:
                group.algorithm.load_state(same[group.members])

    def undo(self, state: dict[str, Any]) -> None:
        """Goes back to what `state` gave of the same groups before a step."""
        for group, before in zip(self._groups, state["groups"], strict=True):
            group.algorithm.load_state(before)

    def read_residual(self) -> Values:
        """A copy of all residuals, in the layout's order."""
        if len(self) == 1:
            return self[0].accumulator.read_residual()
        residual = np.empty(self._layout.n, self._layout.dtype)
        for group in self._groups:
            values = group.accumulator.read_residual()
            for part, own in self._places(group):
                residual[part] = values[own]
        return residual

    def load_residual(self, residual: Values) -> None:
        """Gives every group its part of a residual that is in the layout's order."""
        if len(self) == 1:
            self[0].accumulator.load_residual(residual)
            return
        for group in self._groups:
            values = np.empty(group.layout.n, group.layout.dtype)
            for part, own in self._places(group):
                values[own] = residual[part]
            group.accumulator.load_residual(values)

    def _places(self, group: Group[L]) -> Iterator[tuple[slice, slice]]:
        """Where every member lies in the layout of all gradients, and in the group's own."""
        all_, own = self._layout.offsets.tolist(), group.layout.offsets.tolist()
        for place, index in enumerate(group.members):
            yield slice(all_[index], all_[index + 1]), slice(own[place], own[place + 1])


def cut(layout: Layout, order: Sequence[int], bucket_bytes: int | str | None) -> Cuts:
    """The gradients of each group; one group where bucket_bytes is no number.

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
