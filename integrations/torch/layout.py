"""The flat vector's parts as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.mode import Update
from horovod_oktopk.vectors.layout import Layout, scatter
from horovod_oktopk.vectors.sparse import SparseVector

CHANGED = ("'{name}' is {now} now, and was {then} at the first step: convert or move the model before the first "
           "step, or a copy of it (copy.deepcopy)")


class TorchLayout(Layout):
    """The flat view over parameters (name → tensor), in the mapping's order.

    Raises PluginError for parameters on several devices.
    """

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        super().__init__((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named.items())
        self.parameters = list(named.values())
        self._members = set(self.parameters)
        self._kinds = [_kind(p) for p in self.parameters]
        devices = {str(p.device) for p in self.parameters}
        if len(devices) > 1:
            raise PluginError(f"the parameters of one optimizer must lie on one device; got {sorted(devices)}: "
                              "make an optimizer for each")
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")

    def __contains__(self, p: torch.Tensor) -> bool:
        return p in self._members

    def changed(self, strides: bool = True) -> str | None:
        """Return a message on a parameter whose dtype, device or shape has changed, as by `model.half()`, or None.

        strides: True if it must lie in memory as it did when this was laid out.
        """
        for (name, *_), p, then in zip(self.entries, self.parameters, self._kinds, strict=True):
            now = _kind(p)
            if now != then and (strides or now[:-1] != then[:-1]):
                return CHANGED.format(name=name, now=_in_words(now), then=_in_words(then))
        return None

    def _fits(self, values: NDArray[Any], dtype: str) -> bool:
        return bool(torch.isfinite(torch.from_numpy(values).to(getattr(torch, dtype))).all())

    def pieces(self, tensors: list[torch.Tensor]) -> Iterator[tuple[int, Any]]:
        """Yield the gradients as (offset, flat array) in host memory, or as (offset, flat tensor) on a device."""
        for offset, tensor in zip(self.offsets[:-1], tensors, strict=True):
            flat = tensor.reshape(-1)
            if flat.device.type != "cpu":
                yield int(offset), flat
            elif flat.dtype is torch.bfloat16:  # NumPy has none: converted in parts, so that no copy of n is made
                for start in range(0, len(flat), 1 << 20):
                    yield int(offset) + start, flat[start:start + (1 << 20)].float().numpy()
            else:
                yield int(offset), flat.numpy()

    def pieces_in_host_memory(self, tensors: list[torch.Tensor], clear: bool) -> Iterator[tuple[int, Any]]:
        """Yield the same, copied from a device. clear: leaves zeros in tensors of the layout's dtype."""
        dtype = torch.float64 if self.dtype == np.float64 else torch.float32
        for offset, flat in self.pieces(tensors):
            if isinstance(flat, torch.Tensor):
                yield offset, flat.to("cpu", dtype).numpy()
                if clear and flat.dtype is dtype:
                    flat.zero_()
            else:
                yield offset, flat

    def write(self, update: Update | None, gradients: list[torch.Tensor],
              cleared: bool = False) -> list[torch.Tensor]:
        """Return the update as dense tensors; all NaN if there is none.

        They lie in the gradients' own memory, and so in their layout (channels_last stays so).
        cleared: contiguous gradients of the layout's dtype are zero already.
        """
        outputs = [_memory_of(gradient) for gradient in gradients]
        if update is None:
            return [out.fill_(float("nan")) for out in outputs]
        own_dtype = torch.float64 if self.dtype == np.float64 else torch.float32
        for out, part in zip(outputs, self.parts(update), strict=True):
            _write(out, part, cleared and out.is_contiguous() and out.dtype is own_dtype)
        return outputs


Kind = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]


def _kind(p: torch.Tensor) -> Kind:
    return p.dtype, p.device, p.shape, p.stride()


def _in_words(kind: Kind) -> str:
    dtype, device, shape, strides = kind
    return f"{str(dtype).removeprefix('torch.')} on {device}, of shape {tuple(shape)} and strides {strides},"


def _memory_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient itself; other memory if its elements share theirs (an expanded tensor)."""
    strides = zip(gradient.stride(), gradient.shape, strict=True)
    is_expanded = any(stride == 0 and size > 1 for stride, size in strides)
    return torch.empty_like(gradient) if is_expanded else gradient


def _write(out: torch.Tensor, part: SparseVector, zero: bool) -> None:
    """Write a gradient's part of the update over the gradient. zero: the gradient is zero already."""
    if out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64) and out.is_contiguous():
        scatter(out.view(-1).numpy(), part, zero)
        return
    indices, values = torch.from_numpy(part.indices).to(out.device), torch.from_numpy(part.values).to(out.device)
    if not zero:
        out.zero_()
    if out.is_contiguous():
        out.view(-1)[indices] = values.to(out.dtype)
    else:
        out[torch.unravel_index(indices, out.shape)] = values.to(out.dtype)
