"""`compression=StepAhead(...)`: local steps, what they did is reduced, and gradients are the program's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from horovod_oktopk import PluginError
from tests.scenarios.common import assert_disagreement, is_last, needs
from tests.torch.library import OkTopk, StepAhead, hvd, shared_parameters, step_report
from tests.torch.scenarios.common import assert_equal_everywhere, descend, distribute, flat, raised_everywhere

OPTIONS = StepAhead(OkTopk(density=0.05))


def model_of(seed: int = 0) -> torch.nn.Module:
    """Return a model that is the same on all ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))
    return remembering(model)


def remembering(model: torch.nn.Module) -> torch.nn.Module:
    """Have the model know where it started."""
    model.start = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model


def distributed(model: torch.nn.Module, compression: Any = OPTIONS, optimizer: Any = torch.optim.SGD,
                **arguments: Any) -> Any:
    settings = {"lr": 0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})}
    return distribute(model, compression, optimizer(model.parameters(), **settings), **arguments)


def own_data(step: int, *shape: int) -> torch.Tensor:
    """Return this rank's data."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    inputs = own_data(step, 8, 16).to(next(model.parameters()).dtype)
    return torch.nn.functional.mse_loss(model(inputs), torch.sin(inputs[:, :4]))


def closure_of(model: torch.nn.Module, optimizer: Any, step: int, clips: bool = False) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    return closure


def train(model: torch.nn.Module, optimizer: Any, steps: range,
          before_step: Callable[[], Any] = lambda: None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before_step()
        optimizer.step()


def made(*arguments: Any, **options: Any) -> tuple[torch.nn.Module, Any]:
    """Return a model and its optimizer."""
    model = model_of()
    return model, distributed(model, *arguments, **options)


def trained(steps: int, *arguments: Any, **options: Any) -> tuple[torch.nn.Module, Any]:
    """Return a model and its optimizer after `steps` steps."""
    model, optimizer = made(*arguments, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def shared_of(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    with shared_parameters(optimizer):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_shared_is_equal(model: torch.nn.Module, optimizer: Any) -> None:
    """Assert that shared parameters are equal and finite, and have left the model's start."""
    shared = shared_of(model, optimizer)
    assert_equal_everywhere(shared.values())
    assert all(p.isfinite().all() for p in shared.values())
    assert not all(torch.equal(shared[name], start) for name, start in model.start.items()), "they have not moved"


def check_any_optimizer_takes_the_step() -> None:
    for make in (lambda p: torch.optim.AdamW(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
                 lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
                 lambda p: torch.optim.Adam(p, lr=0.01, fused=True), lambda p: torch.optim.RMSprop(p, lr=0.01)):
        model = model_of()
        optimizer = distribute(model, OPTIONS, make(model.parameters()))
        before = flat(shared_of(model, optimizer))
        train(model, optimizer, range(3))
        assert not np.array_equal(before, flat(shared_of(model, optimizer)))
        assert_shared_is_equal(model, optimizer)
        assert float(optimizer.param_groups[0]["lr"]) in (0.1, np.float32(0.01), 0.01), "it is the user's again"


def check_closures_clipping_and_schedulers_are_as_without_horovod() -> None:
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(4):
        assert torch.isfinite(optimizer.step(closure_of(model, optimizer, step, clips=True)))
        scheduler.step()
    assert np.isclose(optimizer.param_groups[0]["lr"], 0.001)
    assert_shared_is_equal(model, optimizer)


def check_autocast_sees_the_parameters_that_come_in() -> None:
    """Autocast keeps its casts of parameters as long as its context lasts."""
    model, optimizer = trained(3, StepAhead(OkTopk(density=0.05), overlap=False))
    inputs, autocast = own_data(0, 8, 16), partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    with autocast():
        own = model(inputs)
        with shared_parameters(optimizer):
            seen = model(inputs)
        again = model(inputs)
    with shared_parameters(optimizer), autocast():
        assert torch.equal(seen, model(inputs))
    assert torch.equal(own, again)
    assert hvd.size() == 1 or not torch.equal(own, seen)


def check_gradients_may_have_another_dtype() -> None:
    needs(hasattr(torch.Tensor, "grad_dtype"), "PyTorch's Tensor.grad_dtype")
    model, optimizer = made()
    for p in model.parameters():
        p.grad_dtype = torch.bfloat16
    train(model, optimizer, range(3))
    assert next(model.parameters()).grad.dtype is torch.bfloat16
    assert_shared_is_equal(model, optimizer)


def check_a_step_that_runs_no_hooks_is_refused() -> None:
    """Its learning rate cannot be changed for it."""
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.step = lambda: None
    optimizer = distribute(model, StepAhead(OkTopk(density=0.05), ahead=0.5), plain)
    loss_of(model, 0).backward()
    assert all("has run no hooks" in message for message in raised_everywhere(PluginError, optimizer.step))


class Checkpointed(torch.nn.Module):
    """Model that keeps no activations: the backward pass computes them again."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=False)


def check_compiled_and_checkpointed_models_train_like_plain_ones() -> None:
    """Send all elements, so that no selection magnifies how the compiler's gradients differ in rounding."""
    for compression in (StepAhead(OkTopk(density=1.0)), OkTopk(density=1.0)):
        found = []
        for outer in (lambda model: model, Checkpointed, partial(torch.compile, backend="aot_eager")):
            model, optimizer = made(compression)
            train(outer(model), optimizer, range(4))
            assert_shared_is_equal(model, optimizer)
            found.append(flat(shared_of(model, optimizer)))
        plain, checkpointed, compiled = found
        np.testing.assert_array_equal(checkpointed, plain)
        np.testing.assert_allclose(compiled, plain, rtol=1e-4, atol=1e-5)


def check_gradients_stay_the_ranks_own() -> None:
    model, optimizer = made()
    loss_of(model, 0).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), before, strict=True))
    optimizer.step()
    train(model, optimizer, range(1, 3), lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1))
    assert_shared_is_equal(model, optimizer)


def check_missing_sparse_and_frozen_gradients_are_nobodys_business() -> None:
    torch.manual_seed(0)
    model = remembering(torch.nn.ModuleDict({"table": torch.nn.Embedding(30, 4, sparse=True),
                                             "out": torch.nn.Linear(4, 1), "unused": torch.nn.Linear(2, 2)}))
    optimizer = distribute(model, OPTIONS, lr=0.5)
    for step in range(5):
        if step == 3:
            model["out"].weight.requires_grad_(False)
        words = torch.tensor([hvd.rank(), 5, 7 + step])
        descend(optimizer, model["out"](model["table"](words)).square().sum())
    assert_shared_is_equal(model, optimizer)


def check_every_unnamed_operation_of_the_program_meets_its_like() -> None:
    """Horovod would name them by a count that an exchange, beside them, raises at another time on each rank."""
    needs(hasattr(hvd, "mpi_ops"), "Horovod's own operations")
    model, optimizer = made(StepAhead(OkTopk(density=0.05, transport="horovod")))
    for step in range(20):
        train(model, optimizer, range(step, step + 1))
        time.sleep(0.002 * ((step + hvd.rank()) % 3))
        given = torch.ones(1, requires_grad=True)
        total = hvd.allreduce(given, op=hvd.Sum)
        total.backward()
        assert (total.item(), given.grad.item()) == (hvd.size(), hvd.size())


def check_every_operation_that_one_rank_cannot_begin_leaves_the_others_names() -> None:
    needs(hasattr(hvd, "mpi_ops"), "Horovod's own operations")
    if is_last(hvd):
        with pytest.raises(ValueError, match="not supported"):
            hvd.allreduce(torch.ones(1, dtype=torch.complex64))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_every_rank_may_have_a_loss_scale_of_its_own() -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**(10 + hvd.rank()), growth_interval=3)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 2 and is_last(hvd):
            next(model.parameters()).grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert_shared_is_equal(model, optimizer)
    assert step_report(optimizer).step == 6, "the rank that overflowed took part in every exchange"


def check_two_optimizers_may_take_their_steps_in_another_order_on_each_rank() -> None:
    models = [model_of(seed) for seed in (0, 1)]
    optimizers = [distributed(model) for model in models]
    pairs = list(zip(models, optimizers, strict=True))
    for step in range(6):
        for pair in pairs if step < 2 or hvd.rank() % 2 else pairs[::-1]:
            train(*pair, range(step, step + 1))
    for pair in pairs:
        assert_shared_is_equal(*pair)


def check_parameters_in_another_order_in_memory_on_one_rank_are_refused() -> None:
    """Elements are numbered in an exchange as they lie in memory."""
    weight = torch.nn.Parameter(torch.ones(4, 3, 2, 2))
    if is_last(hvd):
        weight = torch.nn.Parameter(weight.detach().to(memory_format=torch.channels_last))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), named_parameters=[("w", weight)],
                                         compression=OPTIONS)
    weight.sum().backward()
    assert_disagreement(hvd, optimizer.step, "dimensions in memory [0, 2, 3, 1]")
