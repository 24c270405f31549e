"""Names that fragments of PyTorch under torchrun use: a model, an optimizer, and functions of a training script."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_oktopk.distributed import OkTopk, StepAhead
from tests.distributed.hvd import hvd

__all__ = ["finish", "hvd", "prepare"]


def prepare(code: str, path: str) -> dict[str, Any]:
    """Return the names. The model is in DDP if the fragment is about that."""
    torch.manual_seed(1)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if "model.module" in code or "_hook" in code or "leave_gradients" in code:
        model = DistributedDataParallel(model)
    names: dict[str, Any] = {"torch": torch, "dist": dist, "OkTopk": OkTopk, "StepAhead": StepAhead, "model": model,
                             "epochs": 2, "optimizer": optimizer, "path": path,
                             "validate": lambda model: model(torch.ones(1, 4))}
    names["train"] = lambda epoch: train(names)
    return names


def finish(names: dict[str, Any]) -> None:
    """Train with what a fragment has made; the ranks, which have other data, stay equal."""
    train(names)
    if "DistributedOptimizer" not in names:
        total = sum(p.sum().item() for p in names["model"].parameters())
        assert len(set(hvd.allgather_object(total))) == 1


def train(names: dict[str, Any]) -> None:
    names["optimizer"].zero_grad()
    x = torch.full((2, 4), 1.0 + hvd.rank())
    (names["model"](x) - x.sum(1, keepdim=True)).square().mean().backward()
    names["optimizer"].step()
