"""Names that fragments of PyTorch use: a model, an optimizer, data, and functions of a training script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from horovod_oktopk.torch import OkTopk, StepAhead, synchronize_replicas


def prepare(code: str, path: str) -> dict[str, Any]:
    """Return the names. If the fragment makes no distributed optimizer, it finds one that has taken a step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    names = {"hvd": hvd, "torch": torch, "OkTopk": OkTopk, "StepAhead": StepAhead, "model": model, "epochs": 2,
             "path": path, "device": "cpu",
             "batch": torch.ones(4, 4), "loss_of": lambda outputs: outputs.square().mean(),
             "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
             "scaler": torch.amp.GradScaler("cpu"), "train": lambda epoch: train(names), "writer": Writer(),
             "validate": lambda model: model(torch.ones(1, 4)),
             "save": lambda model, optimizer: (model.state_dict(), optimizer.state_dict())}
    if "DistributedOptimizer(" not in code:
        names["optimizer"] = hvd.DistributedOptimizer(names["optimizer"], named_parameters=model.named_parameters(),
                                                      compression=OkTopk(density=0.5))
        train(names)
    if ".synchronize()" in code:
        backward(names, names["scaler"].scale if "scaler" in code else lambda loss: loss)
    return names


def finish(names: dict[str, Any]) -> None:
    """Train with what a fragment has made."""
    if hasattr(names["optimizer"], "synchronize"):
        names["optimizer"].zero_grad()
        train(names)
        synchronize_replicas(names["optimizer"])


def train(names: dict[str, Any]) -> None:
    names["optimizer"].zero_grad()
    backward(names, lambda loss: loss)
    names["optimizer"].step()


def backward(names: dict[str, Any], scaled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.full((2, 4), 1.0 + hvd.rank())
    scaled((names["model"](x) - x.sum(1, keepdim=True)).square().mean()).backward()


class Writer:
    """Writer like TensorBoard's; it keeps what it is given."""

    def __init__(self) -> None:
        self.written: dict[str, float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written[tag] = scalar_value
