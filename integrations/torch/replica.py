"""A mode over PyTorch's tensors; with StepAhead over this rank's own parameters, in place, in memory's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.make import make_mode
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.modes.step_ahead.pace import normalizes
from horovod_oktopk.selection.parameter_accumulator import (
    HostReplica,
    NumpyParameterAccumulator,
    ParameterAccumulator,
    Pieces,
    Replica,
)
from horovod_oktopk.torch.device import TorchParameterAccumulator, make_accumulator
from horovod_oktopk.torch.tensors import TorchLayout, memory_order
from horovod_oktopk.transport.base import Ranks
from horovod_oktopk.vectors.sparse import DenseVector, SparseVector, Values


class TorchHostReplica(HostReplica):
    """A Replica in host memory. read: gives the parameters' memory as flat tensors, in the layout's order."""

    def __init__(self, layout: TorchLayout, read: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__(layout, lambda: [flat.numpy() for flat in read()])
        self._parameters = layout.parameters

    def logical(self, values: Values) -> Values:
        return _converted(logical, values, self._parameters)

    def in_memory(self, values: Values) -> Values:
        return _converted(in_memory, values, self._parameters)


class TorchReplica(Replica):
    """The same on a device: flat arrays are tensors there."""

    def __init__(self, layout: TorchLayout, read: Callable[[], list[torch.Tensor]]) -> None:
        self._layout = layout
        self._read = read

    def pieces(self) -> Pieces:
        return list(zip(self._layout.offsets[:-1].tolist(), self._read(), strict=True))

    def logical(self, values: Values) -> Values:
        return _converted(logical, values, self._layout.parameters)

    def in_memory(self, values: Values) -> Values:
        return _converted(in_memory, values, self._layout.parameters)

    def add(self, delta: SparseVector | DenseVector) -> None:
        """Send the delta to the device at once, and add each part to its parameter there."""
        device = self._layout.device
        values = torch.from_numpy(delta.values).to(device)
        if isinstance(delta, DenseVector):
            for offset, own in self.pieces():
                own += values[offset:offset + len(own)]
            return
        indices = torch.from_numpy(delta.indices).to(device)
        cuts = np.searchsorted(delta.indices, self._layout.offsets)
        for (offset, own), first, last in zip(self.pieces(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            if first < last:
                where = indices[first:last] - offset
                own[where] += values[first:last]

    def assign(self, values: torch.Tensor) -> None:
        for offset, own in self.pieces():
            own.copy_(values[offset:offset + len(own)])

    def swap(self, values: torch.Tensor) -> None:
        for offset, own in self.pieces():
            part = values[offset:offset + len(own)]
            before = own.clone()
            own.copy_(part)
            part.copy_(before)


def flat_memory(name: str, p: torch.Tensor) -> torch.Tensor:
    """All elements of p in the order in which they lie in memory (channels_last too): shape (n,), sharing p's memory.

    Raises PluginError for a tensor whose elements do not fill one stretch of memory.
    """
    data = p.detach()
    in_order = data if data.is_contiguous() else data.permute(memory_order(data))
    if not in_order.is_contiguous():
        raise PluginError(f"StepAhead needs parameters that fill one stretch of memory; '{name}' of shape "
                          f"{tuple(p.shape)} has strides {p.stride()}: make it contiguous")
    return in_order.view(-1)


def logical(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reorder values from the order in memory of a tensor like this to the order of its indices."""
    if like.is_contiguous():
        return flat
    order = memory_order(like)
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([like.shape[dimension] for dimension in order]).permute(back).reshape(-1)


def in_memory(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reorder values from the order of a tensor's indices to the order in memory, as `flat_memory` has them."""
    return values if like.is_contiguous() else values.view(like.shape).permute(memory_order(like)).reshape(-1)


def _converted(convert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], values: Values,
               parameters: list[torch.Tensor]) -> Values:
    """All parameters' values, each converted."""
    if all(p.is_contiguous() for p in parameters):
        return values
    cuts = np.cumsum([p.numel() for p in parameters])[:-1]
    parts = [torch.from_numpy(part) for part in np.split(values, cuts)]
    converted: Values = torch.cat([convert(part, p) for part, p in zip(parts, parameters, strict=True)]).numpy()
    return converted


def mode_of(options: Any, average: bool, layout: TorchLayout, ranks: Ranks, optimizer: type,
            settings: Sequence[str]) -> Mode:
    """Return the mode of an optimizer of this class. settings: names of its hyperparameters."""
    return make_mode(options, average, layout, ranks, make_accumulator, lambda: _parameters(layout),
                     normalizes=normalizes(optimizer), settings=settings)


def _parameters(layout: TorchLayout) -> tuple[ParameterAccumulator, Replica]:
    names = [name for name, *_ in layout.entries]

    def read() -> list[torch.Tensor]:
        message = layout.changed()
        if message is not None:
            raise PluginError(message)
        return [flat_memory(name, p) for name, p in zip(names, layout.parameters, strict=True)]

    if layout.device.type == "cpu":
        return NumpyParameterAccumulator(layout.n, layout.dtype), TorchHostReplica(layout, read)
    return TorchParameterAccumulator(layout.n, layout.dtype, layout.device), TorchReplica(layout, read)
