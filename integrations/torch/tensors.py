"""The gradients of one step, laid out flat, as a mode reads and writes them; and NumPy over Horovod's collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from numpy.typing import NDArray

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.mode import Gradients, Update
from horovod_oktopk.modes.step_ahead.pace import elements_of_rows, gather_by_parts
from horovod_oktopk.torch.private import rows_of, values_of
from horovod_oktopk.transport.collectives import HorovodTransport
from horovod_oktopk.transport.horovod import HorovodRanks
from horovod_oktopk.vectors.sparse import Indices, Layout, SparseVector, Values, scatter

CHANGED = ("'{name}' is {now} now, and was {then} at the first step: convert or move the model before the first "
           "step, or a copy of it (copy.deepcopy)")


class TorchTransport(HorovodTransport):
    """See HorovodTransport."""

    hvd, concurrent = hvd, True
    to_tensor = staticmethod(torch.from_numpy)
    failures = (HorovodInternalError,)


def ranks_of(process_set: Any, own_channel: bool = False, yield_cpu: bool = False) -> HorovodRanks:
    """Return the ranks of a process set; see HorovodRanks and Ranks."""
    return HorovodRanks(process_set, TorchTransport, own_channel, yield_cpu)


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

    def describe_memory(self) -> list[str]:
        return [line if p.is_contiguous() else f"{line}, dimensions in memory {memory_order(p)}"
                for line, p in zip(self.describe(), self.parameters, strict=True)]

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


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from the widest stride to the narrowest: in this order the elements lie in memory."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])


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


class OwnGradients(Gradients):
    """This rank's `p.grad` of a layout's parameters, which stay as they are; a missing one is zero."""

    def __init__(self, layout: TorchLayout) -> None:
        self.layout = layout

    def elements(self, places: Indices) -> Values:
        return gather_by_parts(places, self.layout.offsets,
                               lambda part, within: _elements(self.layout.parameters[part].grad, within))

    def all_finite(self) -> bool:
        return are_finite([p.grad for p in self.layout.parameters if p.grad is not None])


class DenseGradients(OwnGradients):
    """The same as dense tensors, over which an update is written: it becomes `p.grad`.

    A gradient that came sparse becomes so again. in_host_memory: pieces are copied from a device.
    """

    def __init__(self, layout: TorchLayout, in_host_memory: bool) -> None:
        super().__init__(layout)
        self._in_host_memory = in_host_memory
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in layout.parameters]
        self._were_sparse = [gradient.is_sparse for gradient in gradients]
        self._tensors = [each.to_dense() if each.is_sparse else each for each in gradients]

    def pieces(self) -> Iterator[tuple[int, Any]]:
        if self._in_host_memory:
            return self.layout.pieces_in_host_memory(self._tensors, clear=True)
        return self.layout.pieces(self._tensors)

    def write(self, update: Update | None, cleared: bool) -> None:
        written = self.layout.write(update, self._tensors, cleared)
        for p, gradient, was_sparse in zip(self.layout.parameters, written, self._were_sparse, strict=True):
            p.grad = gradient.to_sparse() if was_sparse else gradient


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return True if all elements are finite."""
    values = list(map(values_of, gradients))
    if not values:
        return True
    total = torch.stack([each.sum(dtype=torch.float32).to(values[0].device) for each in values]).sum()
    # A sum is finite only if its terms are; it may overflow though they are.
    return bool(torch.isfinite(total)) or all(bool(torch.isfinite(each).all()) for each in values)


def without_rows(p: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of zeros."""
    nowhere = torch.empty(1, 0, dtype=torch.long, device=p.device)
    return torch.sparse_coo_tensor(nowhere, p.new_empty(0, *p.shape[1:]), p.shape)


def _elements(gradient: torch.Tensor | None, places: Indices) -> Values:
    if gradient is None:
        return np.zeros(len(places))
    if gradient.is_sparse:
        rows, values = rows_of(gradient).cpu().numpy(), values_of(gradient)
        return elements_of_rows(rows, values.detach().cpu().numpy(), places)
    if gradient.device.type != "cpu":
        chosen: Values = torch.take(gradient.detach(), torch.from_numpy(places).to(gradient.device)).cpu().numpy()
        return chosen
    whole: Values = gradient.detach().numpy()
    found: Values = (whole.reshape(-1)[places] if whole.flags.c_contiguous
                     else whole[np.unravel_index(places, whole.shape)])
    return found
