"""Where every parameter's gradient lies in the one flat vector: name order, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import torch

from ..core.sparse import SparseVector
from ..core.wire import MAX_ELEMENTS
from ..errors import OptionError, PluginError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Layout:
    """The flat view over parameters (name → tensor), in the mapping's order.

    n: elements in all. offsets: int64, shape (number of parameters + 1,).
    Raises OptionError for a dtype other than DTYPES, and PluginError for parameters on several devices.
    """

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self.names = list(named)
        self.parameters = list(named.values())
        self.offsets = np.concatenate([[0], np.cumsum([p.numel() for p in self.parameters])]).astype(np.int64)
        self.n = int(self.offsets[-1])
        self._members = set(self.parameters)
        self._check()
        self.dtype = np.dtype(np.float64 if any(p.dtype is torch.float64 for p in self.parameters) else np.float32)
        """What the residual is kept in: float64 if any parameter is, float32 otherwise."""
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")

    def __contains__(self, p: torch.Tensor) -> bool:
        return p in self._members

    def describe(self) -> Iterator[str]:
        """One line for each parameter: what must be equal on all ranks."""
        for name, p in zip(self.names, self.parameters, strict=True):
            yield f"parameter {name}: shape {tuple(p.shape)}, {p.dtype}"

    def representable(self, update: SparseVector) -> bool:
        """Whether every value is finite in the dtype of its parameter (float16 overflows early)."""
        return all(bool(torch.isfinite(torch.from_numpy(part.values).to(p.dtype)).all())
                   for p, part in self._parts(update))

    def write(self, update: SparseVector, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The update as dense tensors, in place where a gradient is contiguous."""
        outputs = []
        for (p, part), gradient in zip(self._parts(update), gradients, strict=True):
            out = (gradient.zero_() if gradient.is_contiguous()
                   else torch.zeros(p.shape, dtype=p.dtype, device=p.device))
            if len(part):
                indices = torch.from_numpy(part.indices).to(out.device)
                out.view(-1)[indices] = torch.from_numpy(part.values).to(out.device, out.dtype)
            outputs.append(out)
        return outputs

    def _parts(self, update: SparseVector) -> Iterator[tuple[torch.Tensor, SparseVector]]:
        """Each parameter with its part of the update; indices from the parameter's own start."""
        for p, offset, part in zip(self.parameters, self.offsets[:-1], update.split(self.offsets), strict=True):
            yield p, SparseVector(part.indices - offset, part.values)

    def _check(self) -> None:
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.dtype not in DTYPES:
                raise OptionError(f"the gradient of '{name}' must be one of {DTYPES}; got {p.dtype}")
        devices = {str(p.device) for p in self.parameters}
        if len(devices) > 1:
            raise PluginError(f"the parameters of one optimizer must lie on one device; got {sorted(devices)}")
        if self.n >= MAX_ELEMENTS:
            raise OptionError(f"at most {MAX_ELEMENTS - 1} gradient elements can be reduced at once; got {self.n}")
