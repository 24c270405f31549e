"""The flat vector's parts as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import torch

from ..errors import PluginError
from ..reducer.flat import Update
from ..reducer.layout import Layout, scatter

if TYPE_CHECKING:
    from typing import Self  # not in Python 3.10


class TorchLayout(Layout):
    """The flat view over parameters (name → tensor), in the mapping's order.

    Raises PluginError for parameters on several devices.
    """

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        super().__init__((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named.items())
        self.parameters = list(named.values())
        self._members = set(self.parameters)
        devices = {str(p.device) for p in self.parameters}
        if len(devices) > 1:
            raise PluginError(f"the parameters of one optimizer must lie on one device; got {sorted(devices)}")
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")

    def __contains__(self, p: torch.Tensor) -> bool:
        return p in self._members

    def _of(self, members: Sequence[int]) -> Self:
        return type(self)({self.entries[index][0]: self.parameters[index] for index in members})

    def _fits(self, values: NDArray[Any], dtype: str) -> bool:
        return bool(torch.isfinite(torch.from_numpy(values).to(getattr(torch, dtype))).all())

    def pieces(self, tensors: list[torch.Tensor]) -> Iterator[tuple[int, Any]]:
        """The gradients as (offset, flat array) in host memory, or as (offset, flat tensor) on a device."""
        for offset, tensor in zip(self.offsets[:-1], tensors, strict=True):
            flat = tensor.reshape(-1)
            if flat.device.type != "cpu":
                yield int(offset), flat
            elif flat.dtype is torch.bfloat16:  # NumPy has none: converted in parts, so that no copy of n is made
                for start in range(0, len(flat), 1 << 20):
                    yield int(offset) + start, flat[start:start + (1 << 20)].float().numpy()
            else:
                yield int(offset), flat.numpy()

    def write(self, update: Update | None, gradients: list[torch.Tensor],
              cleared: bool = False) -> list[torch.Tensor]:
        """The update as dense tensors, in place where a gradient is contiguous; all NaN where there is none.

        cleared: whether gradients of the layout's dtype are zero already.
        """
        if update is None:
            return [tensor.fill_(float("nan")) for tensor in gradients]
        own_dtype = torch.float64 if self.dtype == np.float64 else torch.float32
        outputs = []
        for p, part, gradient in zip(self.parameters, self.parts(update), gradients, strict=True):
            in_place = gradient.is_contiguous()
            out = gradient if in_place else torch.empty(p.shape, dtype=p.dtype, device=p.device)
            zero = cleared and in_place and out.dtype is own_dtype
            if out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64):
                scatter(out.view(-1).numpy(), part, zero)
            else:
                indices, values = torch.from_numpy(part.indices), torch.from_numpy(part.values)
                if not zero:
                    out.zero_()
                out.view(-1)[indices.to(out.device)] = values.to(out.device, out.dtype)
            outputs.append(out)
        return outputs
