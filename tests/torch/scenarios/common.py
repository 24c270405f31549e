"""What scenarios share: gradients that are known exactly, and comparisons over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk.torch import OkTopk

SHAPES = {"b.weight": (7, 5), "a.bias": (11,), "c.scale": (3, 2, 4), "d": (1,)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())


def parameters(dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] | None = None,
               ) -> dict[str, torch.nn.Parameter]:
    """Parameters by name, all zero; deliberately not in name order."""
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in (shapes or SHAPES).items()}


def gradients(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randint(-64, 65, shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def backward(params: dict[str, torch.nn.Parameter], grads: dict[str, torch.Tensor]) -> torch.Tensor:
    """Makes the gradient of every parameter that `grads` names exactly what it says; returns the loss."""
    loss = sum(((params[name] * grads[name]).sum() for name in grads), start=torch.zeros(()))
    loss.backward()
    return loss


def distribute(params: dict[str, torch.nn.Parameter], compression: Any, lr: float = 1.0, **arguments: Any) -> Any:
    """A distributed SGD over the parameters."""
    return hvd.DistributedOptimizer(torch.optim.SGD(params.values(), lr=lr), named_parameters=params.items(),
                                    compression=compression, **arguments)


def flat(tensors: dict[str, Any] | dict[str, torch.Tensor]) -> np.ndarray:
    """One vector, in name order."""
    return np.concatenate([tensors[name].detach().numpy().ravel() for name in sorted(tensors)])


def everywhere(vector: np.ndarray) -> list[np.ndarray]:
    """Every rank's vector."""
    return hvd.allgather_object(vector)


def assert_equal_everywhere(tensors: Iterable[torch.Tensor]) -> None:
    """The same bits on every rank."""
    mine = b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    assert len(set(hvd.allgather_object(mine))) == 1, "the replicas differ"


def raised_everywhere(kind: type[Exception], action: Any) -> list[str]:
    """The messages of the error that `action` raises on every rank."""
    message = None
    try:
        action()
    except kind as error:
        message = str(error)
    messages = hvd.allgather_object(message)
    assert None not in messages, f"{kind.__name__} was raised on some ranks only: {messages}"
    return messages


DENSE = OkTopk(density=1.0, threshold_interval=1)
"""Selects everything at every step: the result is the dense sum."""
