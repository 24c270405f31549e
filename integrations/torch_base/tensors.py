"""One optimizer's gradients, laid out flat, and its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.gradients import LocalGradients, ReducedGradients
from horovod_oktopk.modes.step_ahead.pace import elements_of_rows
from horovod_oktopk.torch_base.peers import Peers
from horovod_oktopk.torch_base.private import rows_of, values_of
from horovod_oktopk.transport.ranks import is_elastic
from horovod_oktopk.vectors.layout import Layout, scatter
from horovod_oktopk.vectors.sparse import Indices, SparseVector, Values

CHANGED = ("'{name}' is {now} now, and was {then} at the first step: convert or move the model before the first "
           "step, or a copy of it (copy.deepcopy)")


class TorchLayout(Layout):
    """The flat view over parameters (name → tensor), in the mapping's order.

    Those that were `compared` before, in a set, are not in the digest: rounding may have parted them since.
    Raises PluginError for parameters on several devices.
    """

    def __init__(self, named: dict[str, torch.Tensor], compared: Collection[torch.Tensor] = ()) -> None:
        super().__init__((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named.items())
        self.parameters = list(named.values())
        self._new = [p for p in self.parameters if p not in compared]
        self.torch_dtype: torch.dtype = getattr(torch, self.dtype.name)
        self._kinds = [_kind(p) for p in self.parameters]
        devices = {str(p.device) for p in self.parameters}
        if len(devices) > 1:
            raise PluginError(f"the parameters of one optimizer must lie on one device; got {sorted(devices)}: "
                              "make an optimizer for each")
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")

    def changed(self, strides: bool = True) -> str | None:
        """Return a message on a parameter whose dtype, device or shape has changed, as by `model.half()`, or None.

        If `strides`, it must lie in memory as it did when this was laid out.
        """
        for (name, *_), p, then in zip(self.entries, self.parameters, self._kinds, strict=True):
            now = _kind(p)
            if now != then and (strides or now[:-1] != then[:-1]):
                return CHANGED.format(name=name, now=_in_words(*now), then=_in_words(*then))
        return None

    def describe_memory(self) -> list[str]:
        return [line if p.is_contiguous() else f"{line}, dimensions in memory {memory_order(p)}"
                for line, p in zip(self.describe(), self.parameters, strict=True)]

    def digest(self) -> str:
        if is_elastic():
            return ""
        found = hashlib.blake2b(digest_size=8)
        for p in self._new:
            found.update(p.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def flat_memory(self) -> list[Any]:
        """Return each parameter's memory as a flat tensor, in the order in which it lies there (channels_last too).

        It may be written over, so autocast forgets its casts of parameters; that does not count as a version.
        Raise PluginError if a parameter has changed, or if its elements do not fill one stretch of memory.
        """
        message = self.changed()
        if message is not None:
            raise PluginError(message)
        in_order = [p.data if p.is_contiguous() else p.data.permute(memory_order(p)) for p in self.parameters]
        for (name, *_), p, data in zip(self.entries, self.parameters, in_order, strict=True):
            if not data.is_contiguous():
                raise PluginError(f"StepAhead needs parameters that fill one stretch of memory; '{name}' of shape "
                                  f"{tuple(p.shape)} has strides {p.stride()}: make it contiguous")
        torch.clear_autocast_cache()
        return [data.view(-1) for data in in_order]


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from the widest stride to the narrowest: in this order the elements lie in memory."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])


def _kind(p: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
    return p.dtype, p.device, p.shape, p.stride()


def _in_words(dtype: torch.dtype, device: torch.device, shape: torch.Size, strides: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}, of shape {tuple(shape)} and strides {strides},"


def overlaps(tensor: torch.Tensor) -> bool:
    """Return True for an expanded tensor, some of whose elements are one in memory."""
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which elements are added up: float64 if they are that, float32 otherwise."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _write(out: torch.Tensor, part: SparseVector, is_zero: bool) -> None:
    """Set a tensor to the elements of a part of a vector. It `is_zero` if it holds zeros already."""
    if out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64) and out.is_contiguous():
        scatter(out.view(-1).numpy(), part, is_zero)
        return
    indices, values = torch.from_numpy(part.indices).to(out.device), torch.from_numpy(part.values).to(out.device)
    if not is_zero:
        out.zero_()
    if out.is_contiguous():
        out.view(-1)[indices] = values.to(out.dtype)
    else:
        out[torch.unravel_index(indices, out.shape)] = values.to(out.dtype)


class OwnGradients(LocalGradients):
    """This rank's `p.grad` of a layout's parameters, which stay as they are; a missing one is zero."""

    layout: TorchLayout

    def elements_of(self, part: int, places: Indices) -> Values:
        gradient = self.layout.parameters[part].grad
        if gradient is None:
            return np.zeros(len(places))
        if gradient.is_sparse:
            return elements_of_rows(rows_of(gradient).cpu().numpy(), _on_host(values_of(gradient)), places)
        return _on_host(torch.take(gradient, torch.from_numpy(places).to(gradient.device)))

    def all_finite(self) -> bool:
        return gradients_are_finite(self.layout.parameters)


class DenseGradients(OwnGradients, ReducedGradients):
    """The same as dense tensors, over which an update is written: it becomes `p.grad`.

    A gradient that came sparse becomes so again. Pieces are copied from a device if `in_host_memory`. Other tensors,
    in the layout's order, may be `given` in place of `p.grad`, which then stays as it is.
    """

    def __init__(self, layout: TorchLayout, in_host_memory: bool = False,
                 given: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__(layout)
        self._in_host_memory, self._are_given = in_host_memory, given is not None
        gradients = given if given is not None else [
            torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in layout.parameters]
        self._were_sparse = [gradient.is_sparse for gradient in gradients]
        self._tensors = [each.to_dense() if each.is_sparse else each for each in gradients]

    def all_finite(self) -> bool:
        return are_finite(lambda: self._tensors) if self._are_given else super().all_finite()

    def pieces(self) -> Iterator[tuple[int, Any]]:
        """Yield arrays in host memory, or tensors on a device; what is copied from there is cleared here."""
        dtype, on_device = self.layout.torch_dtype, self.layout.device.type != "cpu"
        for offset, tensor in zip(self.layout.offsets[:-1].tolist(), self._tensors, strict=True):
            flat = tensor.reshape(-1)
            if on_device and self._in_host_memory:
                yield offset, flat.to("cpu", dtype).numpy()
                if flat.dtype is dtype:
                    flat.zero_()
            elif on_device:
                yield offset, flat
            elif flat.dtype is torch.bfloat16:  # NumPy has none: converted in parts, so that no copy of n is made
                for start in range(0, len(flat), 1 << 20):
                    yield offset + start, flat[start:start + (1 << 20)].float().numpy()
            else:
                yield offset, flat.numpy()

    def write(self, update: SparseVector | None, cleared: bool) -> None:
        """Write into the gradients' own memory, and so in their layout (channels_last stays so)."""
        parts = [None] * len(self._tensors) if update is None else self.layout.parts(update)
        for p, tensor, part, was_sparse in zip(self.layout.parameters, self._tensors, parts, self._were_sparse,
                                               strict=True):
            out = torch.empty_like(tensor) if overlaps(tensor) else tensor
            if part is None:
                out.fill_(float("nan"))
            else:
                is_zero = cleared and out is tensor and out.is_contiguous()
                _write(out, part, is_zero and out.dtype is self.layout.torch_dtype)
            if not self._are_given:
                p.grad = out.to_sparse() if was_sparse else out


def _on_host(gradient: torch.Tensor) -> Values:
    """Return elements in NumPy, which has no bfloat16."""
    found: Values = gradient.detach().to("cpu", wide_dtype(gradient)).numpy()
    return found


def are_finite(parts: Callable[[], Iterable[torch.Tensor]]) -> bool:
    """Return True if all elements are finite. `parts` returns the tensors, once more if need be."""
    sums = [part.sum(dtype=wide_dtype(part)) for part in parts()]
    # A sum is finite only if its terms are; it may overflow though they are.
    return not sums or bool(torch.isfinite(torch.stack([each.to(sums[0]) for each in sums]).sum())) or all(
        bool(torch.isfinite(part).all()) for part in parts())


def gradients_are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Return True if all gradients that these parameters have are finite."""
    return are_finite(lambda: [values_of(p.grad) for p in parameters if p.grad is not None])


def without_rows(p: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of zeros."""
    nowhere = torch.empty(1, 0, dtype=torch.long, device=p.device)
    return torch.sparse_coo_tensor(nowhere, p.new_empty(0, *p.shape[1:]), p.shape)


class Parameters:
    """The parameters of one optimizer, by their names, which fix the order on all ranks."""

    def __init__(self, optimizer: Any, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer, self._names = optimizer, names

    def all(self) -> list[torch.Tensor]:
        """Return all parameters, in the order of the optimizer's groups."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def name_of(self, p: torch.Tensor) -> str:
        """Return a parameter's name, which is a number for one that has come late."""
        return self._names.get(p) or f"unnamed.{next(i for i, q in enumerate(self.all()) if q is p)}"

    def by_name(self, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return some parameters, in the order of their names."""
        return dict(sorted({self.name_of(p): p for p in parameters}.items()))

    def reduce_sparse(self, parameters: Sequence[torch.Tensor], peers: Peers, average: bool) -> None:
        """Reduce the sparse gradients of these parameters by the library, in this order. Collective."""
        gradients = {self.name_of(p): p.grad for p in parameters if p.grad is not None}
        for p, gradient in zip(parameters, peers.reduce_sparse(gradients, average), strict=True):
            p.grad = gradient

    def reduce_all(self, peers: Peers, average: bool, sparse_as_dense: bool) -> bool:
        """Reduce the gradients of all trained parameters by the library; a missing one is zero. Collective.

        Return False, and reduce nothing, if the ranks do not train the same, or one's gradient is sparse and
        another's dense.
        """
        trained = {name: p for name, p in self.by_name(self.all()).items() if p.requires_grad}
        for p in trained.values():
            if p.grad is not None and p.grad.is_sparse and sparse_as_dense:
                p.grad = p.grad.to_dense()
        kinds = {name: None if p.grad is None else p.grad.is_sparse for name, p in trained.items()}
        everyone = peers.together(kinds, [(name, p.shape, p.dtype) for name, p in trained.items()])
        if everyone is None:
            return False
        found = {name: {each[name] for each in everyone} - {None} for name in trained}
        if any(len(each) > 1 for each in found.values()):
            return False
        for name, p in trained.items():
            if p.grad is None:
                p.grad = without_rows(p) if True in found[name] else torch.zeros_like(p)
        sparse = [p for p in trained.values() if p.grad is not None and p.grad.is_sparse]
        dense = [p.grad for p in trained.values() if p.grad is not None and not p.grad.is_sparse]
        if dense:
            peers.reduce(dense, average)
        self.reduce_sparse(sparse, peers, average)
        return True


@contextmanager
def without_scaler(optimizer: Any) -> Iterator[torch.Tensor | bool | None]:
    """Hide a GradScaler's attributes from the optimizer's own step.

    Yields the loss scale that gradients hold; True if they hold none, but a scaler takes the step; None without one.
    """
    found = {name: vars(optimizer).pop(name) for name in ("found_inf", "grad_scale") if name in vars(optimizer)}
    scale = found.get("grad_scale")
    yield (True if scale is None else scale) if "found_inf" in found else None
    vars(optimizer).update(found)  # GradScaler deletes them, but not after an error
