"""The gradients in buckets, each reduced as soon as all of it is ready: one bucket, or several where
`bucket_bytes` is given, so that a bucket crosses the network while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..schemes.algorithm import Algorithm
from ..schemes.base import Scheme
from ..selection.accumulator import ResidualAccumulator
from ..vectors.sparse import Values
from .layout import Layout

L = TypeVar("L", bound=Layout)
Partition = list[tuple[int, ...]]
"""The gradients of each bucket, ascending, in the order in which buckets are reduced."""


@dataclass
class Bucket(Generic[L]):
    """Gradients that are reduced together: a flat vector with a residual and thresholds of its own.

    members: their indices in the layout of all gradients, ascending. layout: of these alone.
    """

    members: tuple[int, ...]
    layout: L
    accumulator: ResidualAccumulator
    algorithm: Algorithm


class Buckets(Generic[L]):
    """All buckets of a layout, in the order in which they are reduced.

    options: their scheme's. make_accumulator: for a bucket's layout.
    """

    def __init__(self, layout: L, options: Scheme, make_accumulator: Callable[[L], ResidualAccumulator],
                 partition: Partition) -> None:
        self._layout = layout
        self._options = options
        self._make_accumulator = make_accumulator
        self._buckets: list[Bucket[L]] = []
        self.split(partition)

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket[L]]:
        return iter(self._buckets)

    def __getitem__(self, index: int) -> Bucket[L]:
        return self._buckets[index]

    def split(self, partition: Partition) -> None:
        """Other buckets, without residuals or state."""
        self._buckets = []  # their memory is free before the new ones need it
        for members in partition:
            part = self._layout.part(members)
            self._buckets.append(Bucket(members, part, self._make_accumulator(part), self._options.build("")))

    @property
    def partition(self) -> Partition:
        """The members of each."""
        return [bucket.members for bucket in self._buckets]

    def describe(self, index: int) -> list[str]:
        """A line that must be equal on all ranks, where there are several."""
        names = ", ".join(name for name, *_ in self._buckets[index].layout.entries)
        return [f"bucket {index + 1} of {len(self)}: {names}"] if len(self) > 1 else []

    def state(self) -> dict[str, Any]:
        """The algorithms' state: plain numbers, strings and lists."""
        states = [{"members": list(bucket.members), **bucket.algorithm.state()} for bucket in self._buckets]
        return {"step": states[0]["step"], "buckets": states}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what `state` gave: of buckets with the same members all, of others the step counter."""
        same = {tuple(bucket["members"]): bucket for bucket in state.get("buckets", ())}
        for bucket in self._buckets:
            bucket.algorithm.forget()
            bucket.algorithm.step = state["step"]
            if bucket.members in same:
                bucket.algorithm.load_state(same[bucket.members])

    def undo(self, state: dict[str, Any]) -> None:
        """Goes back to what `state` gave of the same buckets before a step."""
        for bucket, before in zip(self._buckets, state["buckets"], strict=True):
            bucket.algorithm.load_state(before)

    def read_residual(self) -> Values:
        """A copy of all residuals, in the layout's order."""
        if len(self) == 1:
            return self[0].accumulator.read_residual()
        residual = np.empty(self._layout.n, self._layout.dtype)
        for bucket in self._buckets:
            values = bucket.accumulator.read_residual()
            for part, own in self._places(bucket):
                residual[part] = values[own]
        return residual

    def load_residual(self, residual: Values) -> None:
        """Gives every bucket its part of a residual that is in the layout's order."""
        if len(self) == 1:
            self[0].accumulator.load_residual(residual)
            return
        for bucket in self._buckets:
            values = np.empty(bucket.layout.n, bucket.layout.dtype)
            for part, own in self._places(bucket):
                values[own] = residual[part]
            bucket.accumulator.load_residual(values)

    def _places(self, bucket: Bucket[L]) -> Iterator[tuple[slice, slice]]:
        """Where every member lies in the layout of all gradients, and in the bucket's own."""
        all_, own = self._layout.offsets.tolist(), bucket.layout.offsets.tolist()
        for place, index in enumerate(bucket.members):
            yield slice(all_[index], all_[index + 1]), slice(own[place], own[place + 1])


def split(layout: Layout, order: Sequence[int], bucket_bytes: int | str | None) -> Partition:
    """The gradients of each bucket; one bucket where bucket_bytes is no number.

    order: the gradients in the order in which they become ready. A bucket is closed by the gradient with which it
    reaches bucket_bytes; at least one bucket is given.
    """
    if bucket_bytes is None or isinstance(bucket_bytes, str):
        return [tuple(range(len(layout.entries)))]
    lengths = np.diff(layout.offsets) * layout.dtype.itemsize
    buckets: list[list[int]] = [[]]
    for index in order:
        if lengths[buckets[-1]].sum() >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(index)
    return [tuple(sorted(bucket)) for bucket in buckets]
