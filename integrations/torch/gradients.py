"""The gradients of one step, as a mode reads and writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from horovod_oktopk.modes.mode import Gradients, Update
from horovod_oktopk.modes.step_ahead.noise import elements_of_rows, gather_by_parts
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.private import rows_of, values_of
from horovod_oktopk.vectors.sparse import Indices, Values


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
