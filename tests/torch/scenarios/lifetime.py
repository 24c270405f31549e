"""Nothing lives longer than its model and optimizer: no thread, no memory, no model."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.common import needs
from tests.scenarios.leaks import assert_nothing_stays
from tests.torch.library import OkTopk, Partial, StepAhead, hvd, synchronize_replicas
from tests.torch.scenarios.common import descend, distribute

SEVERAL = 40  # they cost little here, and a thread that ends may leave one only now and then


def train(compression: Any) -> Any:
    """Take two steps of a new model, which is gone afterwards, but for what this returns."""
    model = torch.nn.Linear(30, 10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = distribute(model, compression, lr=0.1)
    for _ in range(2):
        descend(optimizer, model(torch.randn(4, 30)).square().sum())
    return optimizer


def check_optimizers_that_are_dropped_leave_nothing() -> None:
    assert_nothing_stays(hvd, lambda: train(OkTopk(density=0.1)), SEVERAL)


def check_step_ahead_that_is_dropped_with_an_exchange_under_way_leaves_nothing() -> None:
    assert_nothing_stays(hvd, lambda: train(StepAhead(OkTopk(density=0.1), overlap=True)), SEVERAL)


def check_partial_that_is_dropped_leaves_nothing() -> None:
    needs(hvd.size() == 1 or hvd.mpi_enabled(), "MPI")
    assert_nothing_stays(hvd, lambda: synchronize_replicas(train(Partial(OkTopk(density=0.1)))), SEVERAL)


def check_partial_that_is_dropped_without_being_synchronized_leaves_nothing() -> None:
    """Partial is dropped with rounds under way, and gradients in none."""
    needs(hvd.size() == 1 or hvd.mpi_enabled(), "MPI")
    assert_nothing_stays(hvd, lambda: train(Partial(OkTopk(density=0.1), policy="solo")), SEVERAL)


def check_a_gradient_scaler_is_dropped() -> None:
    def scaled() -> None:
        scaler = torch.amp.GradScaler("cpu")
        optimizer = train(OkTopk(density=0.1))
        model = torch.nn.Linear(3, 2)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        optimizer.zero_grad()

    assert_nothing_stays(hvd, scaled, SEVERAL)
