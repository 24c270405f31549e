"""residual + gradient, and w - p, on a CUDA (or any other) device: only what is selected comes to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_oktopk.selection.accumulator import NumpyAccumulator, Pieces, ResidualAccumulator, keep_freed_memory
from horovod_oktopk.selection.parameter_accumulator import ParameterAccumulator
from horovod_oktopk.torch.tensors import TorchLayout
from horovod_oktopk.vectors.sparse import DenseVector, Indices, SparseVector, Values

CHUNK = 1 << 24
"""Number of elements selected at a time: bounds the temporaries, and is plenty for one kernel."""


def make_accumulator(layout: TorchLayout) -> Any:
    """Return the accumulator for the layout's device."""
    if layout.device.type == "cpu":
        return NumpyAccumulator(layout.n, layout.dtype)
    return TorchAccumulator(layout.n, layout.dtype, layout.device)


class DeviceVector:
    """The part of an accumulator that steps select from, on one device; the same bits as in host memory.

    A derived class gives `_chunks`. n: the number of elements. dtype: float32 or float64.
    """

    def __init__(self, n: int, dtype: Any, device: torch.device) -> None:
        keep_freed_memory()
        self.n = n
        self.dtype = np.dtype(dtype)
        self.expected = np.inf
        self._nothing = torch.zeros(0, dtype=torch.float64 if self.dtype == np.float64 else torch.float32,
                                    device=device)

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the vector, part by part, each with its offset: so temporaries stay bounded."""
        raise NotImplementedError

    def expect(self, threshold: float, limit: int) -> None:  # noqa: ARG002 - selecting is a pass of its own here
        self.expected = threshold

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        indices, values = [self._nothing.long()], [self._nothing]
        count = 0
        for start, chunk in self._chunks():
            found = where_passing(chunk, threshold)
            indices.append(found + start)
            values.append(chunk[found])
            count += len(found)
            if count > limit:
                return None
        return SparseVector(torch.cat(indices).cpu().numpy(), torch.cat(values).cpu().numpy())

    def sample(self, stride: int) -> Values:
        parts = [chunk[-start % stride::stride].abs() for start, chunk in self._chunks()]
        magnitudes: Values = torch.cat([self._nothing, *parts]).cpu().numpy()
        return magnitudes

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
        # A sum is finite only if its terms are; it may overflow though they are.
        return bool(torch.isfinite(self._acc.sum())) or bool(torch.isfinite(self._acc).all())

    def commit(self, contributed: Indices | slice, remainder: SparseVector | None = None) -> None:
        self._acc[contributed if isinstance(contributed, slice) else self.on_device(contributed)] = 0
        if remainder is not None:
            self._acc[self.on_device(remainder.indices)] += self.on_device(remainder.values)
        self.residual, self._acc = self._acc, self.residual

    def moments(self) -> tuple[float, float]:
        deviation, mean = torch.std_mean(self._acc, correction=0)
        return float(mean), float(deviation)

    def values(self) -> Values:
        values: Values = self._acc.cpu().numpy()
        return values

    def read_residual(self) -> Values:
        values: Values = self.residual.cpu().numpy().copy()
        return values

    def load_residual(self, values: Values) -> None:
        self.residual.copy_(torch.from_numpy(values))


def where_passing(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the places whose magnitudes reach the threshold, zeros never: int64, ascending."""
    magnitudes, bound = values.abs(), values.new_tensor(threshold).item()  # which may be 0 where threshold is not
    found: torch.Tensor = (magnitudes >= bound if bound > 0 else magnitudes > 0).nonzero().view(-1)
    return found


class TorchParameterAccumulator(DeviceVector, ParameterAccumulator):
    """A ParameterAccumulator in tensors on one device."""

    def __init__(self, n: int, dtype: Any, device: torch.device, shared: torch.Tensor | None = None) -> None:
        super().__init__(n, dtype, device)
        self.shared = self._nothing.new_zeros(n) if shared is None else shared

    def accumulate(self, pieces: Pieces) -> bool:
        self._pieces = pieces
        sums = [chunk.sum() for _, chunk in self._chunks()]
        # A sum is finite only if its terms are; it may overflow though they are.
        return not sums or bool(torch.isfinite(torch.stack(sums)).all()) or all(
            bool(torch.isfinite(chunk).all()) for _, chunk in self._chunks())

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield several small parameters together, or a part of a large one."""
        start = 0
        parts: list[torch.Tensor] = []
        for offset, piece in self._pieces:
            for part in piece.split(CHUNK) if len(piece) else ():
                if parts and offset + len(part) - start > CHUNK:
                    yield start, self._difference(start, parts)
                    start, parts = start + sum(len(each) for each in parts), []
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
        return mean, max(0.0, square - mean**2) ** 0.5

    def values(self) -> Values:
        values: Values = torch.cat([self._nothing, *(chunk for _, chunk in self._chunks())]).cpu().numpy()
        return values

    def commit(self, update: SparseVector | DenseVector) -> None:
        if isinstance(update, DenseVector):
            self.shared -= self.on_device(update.values)
        else:
            self.shared[self.on_device(update.indices)] -= self.on_device(update.values)

    def read_shared(self) -> Values:
        values: Values = self.shared.cpu().numpy()
        return values

    def minus(self, values: Values) -> torch.Tensor:
        return self.shared - self.on_device(values)

    def part(self, start: int, stop: int) -> TorchParameterAccumulator:
        shared = self.shared[start:stop]
        return TorchParameterAccumulator(stop - start, self.dtype, shared.device, shared)
