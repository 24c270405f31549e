"""A mode over PyTorch's tensors, and its memory of n elements: residual + gradient, w - p, and p itself in place.

In host memory the core's classes serve; on a CUDA (or any other) device only what is selected comes to the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_oktopk.modes.make import make_mode
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.modes.step_ahead.pace import normalizes
from horovod_oktopk.selection.accumulator import (
    Accumulator,
    NumpyAccumulator,
    Pieces,
    ResidualAccumulator,
    keep_freed_memory,
)
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator, ParameterAccumulator
from horovod_oktopk.selection.replica import Replica
from horovod_oktopk.torch_base.tensors import TorchLayout, are_finite
from horovod_oktopk.transport.ranks import Ranks
from horovod_oktopk.vectors.runs import Runs
from horovod_oktopk.vectors.sparse import Indices, SparseVector, Values

CHUNK = 1 << 24
"""Number of elements selected at a time: bounds the temporaries, and is plenty for one kernel."""


def make_torch_mode(options: Any, average: bool, layout: TorchLayout, ranks: Ranks, optimizer: type,
                    settings: Sequence[str]) -> Mode[Any]:
    """Return the mode of an optimizer of this class. `settings` names its hyperparameters."""
    n, dtype, device = layout.n, layout.dtype, layout.device
    on_host = device.type == "cpu"

    def of_gradients() -> ResidualAccumulator:
        return NumpyAccumulator(n, dtype) if on_host else TorchAccumulator(n, dtype, device)

    def of_parameters() -> tuple[ParameterAccumulator, Replica]:
        if on_host:
            return NumpyParameterAccumulator(n, dtype), TorchReplica(layout)
        return TorchParameterAccumulator(n, dtype, device), DeviceReplica(layout)

    return make_mode(options, average, layout, ranks, of_gradients, of_parameters, normalizes=normalizes(optimizer),
                     settings=settings)


class DeviceVector(Accumulator):
    """The part of an accumulator that steps select from, on one device; the same bits as in host memory.

    A derived class gives `_chunks`. There are n elements; the dtype is float32 or float64.
    """

    def __init__(self, n: int, dtype: Any, device: torch.device) -> None:
        keep_freed_memory()
        self.n = n
        self.dtype = np.dtype(dtype)
        self.expected = np.inf
        self._nothing = torch.zeros(0, dtype=getattr(torch, self.dtype.name), device=device)

    @abstractmethod
    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Return the (offset, chunk) pairs of acc, in order."""

    def expect_threshold(self, threshold: float, limit: int) -> None:  # noqa: ARG002 - selecting is a pass
        self.expected = threshold

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        indices, values = [self._nothing.long()], [self._nothing]
        count = 0
        bound = self._nothing.new_tensor(threshold).item()  # which may be 0 where threshold is not
        for start, chunk in self._chunks():
            magnitudes = chunk.abs()
            found = (magnitudes >= bound if bound > 0 else magnitudes > 0).nonzero().view(-1)
            indices.append(found + start)
            values.append(chunk[found])
            count += len(found)
            if count > limit:
                return None
        return SparseVector(torch.cat(indices).cpu().numpy(), torch.cat(values).cpu().numpy())

    def sample(self, stride: int) -> Values:
        parts = [chunk[-start % stride::stride].abs() for start, chunk in self._chunks()]
        return torch.cat([self._nothing, *parts]).cpu().numpy()

    def elements_at(self, places: Runs) -> Values:
        parts, indices = [self._nothing], places.indices
        for start, chunk in self._chunks():
            first, last = np.searchsorted(indices, (start, start + len(chunk)))
            parts.append(chunk[self.on_device(indices[first:last] - start)])
        return torch.cat(parts).cpu().numpy()

    def values(self) -> Values:
        found = torch.empty(self.n, dtype=self._nothing.dtype)
        for start, chunk in self._chunks():
            found[start:start + len(chunk)] = chunk
        return found.numpy()

    def on_device(self, values: NDArray[Any]) -> torch.Tensor:
        """Return values or indices from the host in tensors on the device."""
        return torch.from_numpy(values).to(self._nothing.device)


class TorchAccumulator(DeviceVector, ResidualAccumulator):
    """A ResidualAccumulator in tensors on one device."""

    def __init__(self, n: int, dtype: Any, device: torch.device) -> None:
        super().__init__(n, dtype, device)
        self.residual = self._nothing.new_zeros(n)
        self._acc = torch.zeros_like(self.residual)

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, self.n, CHUNK):
            yield start, self._acc[start:start + CHUNK]

    def accumulate(self, pieces: Iterable[tuple[int, torch.Tensor]], clear: bool = False) -> bool:
        for offset, piece in pieces:
            out = self._acc[offset:offset + len(piece)]
            torch.add(self.residual[offset:offset + len(piece)], piece, out=out)
            if clear and piece.dtype is out.dtype:
                piece.zero_()
        return are_finite(lambda: [self._acc])

    def commit(self, contributed: Indices | slice, remainder: SparseVector | None = None) -> None:
        self._acc[contributed if isinstance(contributed, slice) else self.on_device(contributed)] = 0
        if remainder is not None:
            self._acc[self.on_device(remainder.indices)] += self.on_device(remainder.values)
        self.residual, self._acc = self._acc, self.residual

    def moments(self) -> tuple[float, float]:
        deviation, mean = torch.std_mean(self._acc, correction=0)
        return float(mean), float(deviation)

    def read_residual(self) -> Values:
        return self.residual.cpu().numpy().copy()

    def load_residual(self, values: Values) -> None:
        self.residual.copy_(torch.from_numpy(values))


class TorchParameterAccumulator(DeviceVector, ParameterAccumulator):
    """A ParameterAccumulator in tensors on one device."""

    def __init__(self, n: int, dtype: Any, device: torch.device, shared: torch.Tensor | None = None) -> None:
        super().__init__(n, dtype, device)
        self.shared: torch.Tensor = self._nothing.new_zeros(n) if shared is None else shared

    def accumulate(self, pieces: Pieces) -> bool:
        self._pieces = pieces
        return are_finite(lambda: (chunk for _, chunk in self._chunks()))

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        start = 0
        parts: list[torch.Tensor] = []
        for offset, piece in self._pieces:
            for part in piece.split(CHUNK) if len(piece) else ():
                if parts and offset + len(part) - start > CHUNK:
                    yield start, self._difference(start, parts)
                    start, parts = offset, []
                parts.append(part)
                offset += len(part)
        if parts:
            yield start, self._difference(start, parts)

    def _difference(self, start: int, parts: list[torch.Tensor]) -> torch.Tensor:
        own = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self.shared[start:start + len(own)] - own

    def moments(self) -> tuple[float, float]:
        sums = self._nothing.new_zeros(2, dtype=torch.float64)
        for _, chunk in self._chunks():
            sums += torch.stack([chunk.sum(dtype=torch.float64), (chunk.double()**2).sum()])
        mean, square = (sums / self.n).tolist()
        return mean, max(0.0, square - mean * mean) ** 0.5  # mean**2 raises where it overflows

    def commit(self, update: SparseVector) -> None:
        if len(update) == self.n:
            self.shared -= self.on_device(update.values)
        else:
            self.shared[self.on_device(update.indices)] -= self.on_device(update.values)

    def read_shared(self) -> Values:
        return self.shared.cpu().numpy()

    def minus(self, values: Values) -> torch.Tensor:
        return self.shared - self.on_device(values)

    def part(self, start: int, stop: int) -> TorchParameterAccumulator:
        shared = self.shared[start:stop]
        return TorchParameterAccumulator(stop - start, self.dtype, shared.device, shared)


class TorchReplica(Replica):
    """A Replica in host memory; flat arrays have the elements of a parameter in the order in which they lie there."""

    def __init__(self, layout: TorchLayout) -> None:
        super().__init__(layout, lambda: [flat.numpy() for flat in layout.flat_memory()])
        self._parameters = layout.parameters

    def logical(self, values: Values) -> Values:
        return self._reordered(values, to_memory=False)

    def in_memory(self, values: Values) -> Values:
        return self._reordered(values, to_memory=True)

    def _reordered(self, values: Values, to_memory: bool) -> Values:
        if all(p.is_contiguous() for p in self._parameters):
            return values
        found = np.empty_like(values)
        for p, start in zip(self._parameters, self._layout.offsets[:-1].tolist(), strict=True):
            given, taken = (torch.from_numpy(each[start:start + p.numel()]) for each in (values, found))
            if to_memory:
                taken.as_strided(p.shape, p.stride()).copy_(given.view(p.shape))
            else:
                taken.view(p.shape).copy_(given.as_strided(p.shape, p.stride()))
        return found


class DeviceReplica(TorchReplica):
    """The same on a device: flat arrays are tensors there."""

    def __init__(self, layout: TorchLayout) -> None:
        super().__init__(layout)
        self._read, self._device = layout.flat_memory, layout.device

    def add(self, delta: SparseVector) -> None:
        """Send the delta to the device at once, and add each part to its parameter there."""
        values = torch.from_numpy(delta.values).to(self._device)
        if len(delta) == self._layout.n:
            for offset, own in self.pieces():
                own += values[offset:offset + len(own)]
            return
        indices = torch.from_numpy(delta.indices).to(self._device)
        cuts = np.searchsorted(delta.indices, self._layout.offsets)
        for (offset, own), first, last in zip(self.pieces(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            if first < last:
                own[indices[first:last] - offset] += values[first:last]
