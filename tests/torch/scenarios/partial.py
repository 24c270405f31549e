"""Refusals of `Partial` in PyTorch, on every rank; and the state that its optimizer keeps for itself."""

from __future__ import annotations

import time
from typing import Any

import torch

from horovod_oktopk import Dense, OkTopk, Partial, PluginError
from tests.scenarios.common import needs
from tests.torch.library import hvd, synchronize_replicas
from tests.torch.scenarios.common import assert_equal_everywhere, descend, distribute, everywhere, raised_everywhere


def made(model: torch.nn.Module, inner: Any = None, **arguments: Any) -> Any:
    return distribute(model, Partial(Dense(), policy="solo"), inner, lr=0.1, **arguments)


def loss_of(model: torch.nn.Module, scale: float = 1.0) -> torch.Tensor:
    return model(torch.full((3, 4), scale)).sum()


def check_what_would_change_one_update_of_several_is_refused() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = made(model)

    def with_closure() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step(lambda: None)

    def with_a_scaler() -> None:
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)

    assert "step(closure) cannot be used" in raised_everywhere(PluginError, with_closure)[0]
    assert "synchronize()" in raised_everywhere(PluginError, optimizer.synchronize)[0]
    assert "GradScaler" in raised_everywhere(PluginError, with_a_scaler)[0]


def check_sparse_gradients_go_dense_or_not_at_all() -> None:
    for dense in (True, False):
        torch.manual_seed(5)
        model = torch.nn.Embedding(20, 3, sparse=True)
        optimizer = made(model, sparse_as_dense=dense)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            descend(optimizer, model(torch.tensor([hvd.rank(), 7])).sum())

        if not dense:
            assert "sparse_as_dense=True" in raised_everywhere(PluginError, step)[0]
            continue
        before = model.weight.detach().clone()
        step()
        synchronize_replicas(optimizer)
        assert_equal_everywhere(model.parameters())
        changed = (model.weight.detach() != before).any(dim=1).nonzero().flatten().tolist()
        assert changed == sorted({*range(hvd.size()), 7})


def check_adam_and_every_number_of_its_groups() -> None:
    """Rates, betas and decay of a round are one rank's, in every group."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
    inner = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.01},
                               {"params": model[1].parameters(), "lr": torch.tensor(0.1)}], betas=(0.8, 0.9))
    optimizer = made(model, inner)
    for step in range(10):
        time.sleep(0.002 * (hvd.rank() == step % hvd.size()))
        optimizer.param_groups[0]["betas"] = (0.5 + 0.01 * hvd.rank(), 0.9)
        optimizer.param_groups[1]["lr"].fill_(0.1 / (1 + step + hvd.rank()))
        descend(optimizer, model(torch.randn(3, 6)).square().sum())
        assert optimizer.param_groups[0]["betas"] == (0.5 + 0.01 * hvd.rank(), 0.9)
    synchronize_replicas(optimizer)
    assert_equal_everywhere(model.parameters())
    assert_equal_everywhere(value for p in model.parameters() for value in optimizer.state[p].values())


class Counting(torch.optim.SGD):
    """It keeps a number of its own in its groups, which its steps need, as Prodigy does."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.calls, self.param_groups[0]["count"] = 0, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.param_groups[0]["count"] += 1
        return super().step(closure)


def check_numbers_that_steps_change_themselves_stay_as_they_leave_them() -> None:
    model = torch.nn.Linear(6, 2)
    optimizer = made(model, Counting(model.parameters(), lr=0.1))
    for step in range(10):
        time.sleep(0.002 * (hvd.rank() == step % hvd.size()))
        descend(optimizer, model(torch.randn(3, 6)).square().sum())
        assert optimizer.param_groups[0]["count"] == optimizer.calls
    synchronize_replicas(optimizer)
    counts = everywhere(optimizer.param_groups[0]["count"])
    assert counts == everywhere(optimizer.calls) == [counts[0]] * hvd.size()
    assert counts[0] >= 10


def check_synchronizing_without_partial_does_nothing() -> None:
    model = torch.nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    synchronize_replicas(plain)
    synchronize_replicas(distribute(model, OkTopk(density=0.5), plain))


def check_a_late_rank_applies_the_latest_update() -> None:
    """Also if an empty round follows it, which a rank begins that synchronizes."""
    needs(hvd.size() == 2, "2 ranks, and no more")
    for in_order in (True, False):
        p = torch.nn.Parameter(torch.zeros(4))
        optimizer = distribute({"p": p}, Partial(Dense(), policy="solo", in_order=in_order), lr=1.0)
        for value in (0.0, 2.0):
            p.grad = torch.full((4,), value)
            optimizer.step()
            if value == 0:
                synchronize_replicas(optimizer)
                time.sleep(0.5 * hvd.rank())
        synchronize_replicas(optimizer)
        assert p.tolist() == [-2.0] * 4


def check_gradients_that_are_not_handed_in_outlast_synchronizing() -> None:
    """Also where updates of rounds are applied meanwhile, which rank 0 has begun."""
    model = torch.nn.Linear(4, 2)
    optimizer = made(model)
    synchronize_replicas(optimizer)
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, 1.0 + hvd.rank()).backward()
        if hvd.rank() == 0:
            optimizer.step()
        gradient = model.weight.grad.clone()
        hvd.allgather_object("rank 0 has had a round", name="a round")
        before = model.weight.detach().clone()
        synchronize_replicas(optimizer)
        assert torch.equal(model.weight.grad, gradient)
        if number == 0 and hvd.rank() > 0:  # later, its own step may have applied that round already
            assert not torch.equal(model.weight, before), "no update was applied"
        optimizer.step()
    synchronize_replicas(optimizer)


def check_a_state_that_comes_while_rounds_run_is_refused() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = made(model)

    def train() -> None:
        loss_of(model).backward()
        optimizer.step()
        synchronize_replicas(optimizer)

    train()
    state, before = optimizer.state_dict(), model.weight.detach().clone()
    assert "before the first step" in raised_everywhere(PluginError, lambda: optimizer.load_state_dict(state))[0]
    train()
    assert not torch.equal(model.weight, before)


def check_numbers_that_are_integers_on_some_ranks() -> None:
    """lr=1 of one rank, and 0.5 of another that is further in its schedule; and groups that a state has replaced."""
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 2)
    optimizer = made(model, torch.optim.SGD(model.parameters(), lr=1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1 + 2 * hvd.rank(), gamma=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(8):
        time.sleep(0.003 * (hvd.rank() == step % hvd.size()))
        descend(optimizer, (model(torch.randn(3, 4)) * 0.01).square().sum())
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 ** (8 // (1 + 2 * hvd.rank()))
    synchronize_replicas(optimizer)
    assert_equal_everywhere(model.parameters())
