"""The parameters of one optimizer, and what Horovod itself reduces of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.transport.horovod import HorovodRanks

_NOT_ASKED = object()


class Parameters:
    """The parameters of one optimizer, by their names, which fix the order on all ranks."""

    def __init__(self, optimizer: Any, names: Mapping[torch.Tensor, str], op: Any) -> None:
        self._optimizer, self._names, self._op = optimizer, names, op

    def all(self) -> list[torch.Tensor]:
        """Return all parameters, in the order of the optimizer's groups."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def name_of(self, p: torch.Tensor) -> str:
        """Return a parameter's name."""
        return self._names.get(p) or f"unnamed.{next(i for i, q in enumerate(self.all()) if q is p)}"

    def by_name(self, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return some parameters, in the order of their names."""
        named = {self.name_of(p): p for p in parameters}
        return {name: named[name] for name in sorted(named)}

    def reduce_sparse(self, parameters: Sequence[torch.Tensor], process_set: Any) -> None:
        """Reduce the sparse gradients of these parameters by Horovod, in this order. Collective."""
        handles = [hvd.sparse_allreduce_async(p.grad, name=self.name_of(p), op=self._op, process_set=process_set)
                   for p in parameters]
        for p, handle in zip(parameters, handles, strict=True):
            p.grad = handle()


class HostAverage:
    """Gradients that are averaged over the ranks of a host, which is one worker."""

    def __init__(self, parameters: Parameters, ranks: HorovodRanks, op: Any, sparse_as_dense: bool) -> None:
        self._parameters, self._ranks, self._op, self._sparse_as_dense = parameters, ranks, op, sparse_as_dense
        self._process_set: Any = _NOT_ASKED

    def take(self, scheme: Scheme) -> bool:
        """Average the gradients. Collective on the host. Return False if this rank is alone there."""
        if self._process_set is _NOT_ASKED:
            self._process_set = self._ranks.host_set(scheme.transport, scheme.hierarchical)
        if self._process_set is None:
            return False
        trained = [p for p in self._parameters.by_name(self._parameters.all()).values() if p.requires_grad]
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse and self._sparse_as_dense:
                p.grad = p.grad.to_dense()
        dense = [p.grad for p in trained if not p.grad.is_sparse]  # type: ignore[union-attr]
        if dense:
            hvd.grouped_allreduce_(dense, op=self._op, name="horovod_oktopk.host", process_set=self._process_set)
        self._parameters.reduce_sparse([p for p in trained if p.grad.is_sparse],  # type: ignore[union-attr]
                                       self._process_set)
        return True
