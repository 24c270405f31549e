"""Helpers of scenarios: gradients that are known exactly, and comparisons over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.scenarios import common
from tests.torch.library import hvd

Params = dict[str, torch.nn.Parameter]
raised_everywhere = partial(common.raised_everywhere, hvd)
everywhere = partial(common.everywhere, hvd)
total = partial(common.total, hvd)


def parameters(dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = common.SHAPES) -> Params:
    """Return parameters by name, all zero; deliberately not in name order."""
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def gradients(step: int, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Return integers; this rank's, if no other is named."""
    found = common.gradients(step, hvd.rank() if rank is None else rank)
    return {name: torch.from_numpy(values) for name, values in found.items()}


def loss_with(params: Params, grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss of which the gradients are exactly `grads`."""
    return sum(((params[name] * grads[name]).sum() for name in grads), start=torch.zeros(()))


def backward(params: Params, grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss = loss_with(params, grads)
    loss.backward()
    return loss


def distribute(params: Params | torch.nn.Module, compression: Any, inner: Any = None, lr: float = 1.0,
               **arguments: Any) -> Any:
    """Return a distributed optimizer over the parameters: SGD, if no other is given."""
    named = params if isinstance(params, dict) else dict(params.named_parameters())
    return hvd.DistributedOptimizer(inner or torch.optim.SGD(named.values(), lr=lr), named_parameters=named.items(),
                                    compression=compression, **arguments)


def made(compression: Any, shapes: dict[str, tuple[int, ...]] = common.SHAPES,
         **arguments: Any) -> tuple[Params, Any]:
    """Return new parameters and their optimizer."""
    params = parameters(shapes=shapes)
    return params, distribute(params, compression, **arguments)


def descend(optimizer: Any, loss: torch.Tensor) -> None:
    """Take one step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def take_steps(optimizer: Any, params: Params, *steps: int) -> None:
    for step in steps:
        descend(optimizer, loss_with(params, gradients(step)))


def record_of(optimizer: Any) -> dict[str, Any]:
    """Return this rank's state."""
    return optimizer.state_dict()["horovod_oktopk"][0]


def flat(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return one vector, in name order."""
    return np.concatenate([tensors[name].detach().numpy().ravel() for name in sorted(tensors)])


def assert_equal_everywhere(tensors: Iterable[torch.Tensor]) -> None:
    """Assert that every rank has the same bits."""
    mine = b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    assert len(set(everywhere(mine))) == 1, "the replicas differ"
