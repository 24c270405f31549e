"""Hooks of a step, which PyTorch runs inside it, see and set the user's own learning rate."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.common import logged, needs, needs_ranks
from tests.torch.library import OkTopk, Partial, StepAhead, hvd, shared_parameters, synchronize_replicas
from tests.torch.scenarios.common import descend, distribute, flat, gradients, loss_with, parameters

STEPS = 10


def final(compression: Any, how: str) -> tuple[float, Any]:
    """Return the learning rate and the shared parameters after some steps in which the rate changes."""
    params, number = parameters(), [0]
    optimizer = distribute(params, compression, lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def warm(*_: Any) -> None:
        number[0] += 1
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, number[0] / 5)

    if how == "post hook":
        optimizer.register_step_post_hook(lambda *_: decay.step())
    if how == "pre hook":
        optimizer.register_step_pre_hook(warm)
    for step in range(STEPS):
        if how == "before":
            warm()
        descend(optimizer, loss_with(params, gradients(step)))
        if how == "after":
            decay.step()
    synchronize_replicas(optimizer)
    with shared_parameters(optimizer):
        return optimizer.param_groups[0]["lr"], flat(params)


def assert_hooks_equal_lines(compression: Any, *hooks: str) -> None:
    for hook in hooks:
        line = {"post hook": "after", "pre hook": "before"}[hook]
        (rate, mine), (expected, theirs) = final(compression, hook), final(compression, line)
        assert abs(rate - expected) < 1e-12, (hook, rate, expected)
        assert (mine == theirs).all(), hook


def check_a_rate_that_is_set_in_a_hook_is_as_one_in_the_loop() -> None:
    assert_hooks_equal_lines(StepAhead(OkTopk(density=1.0), overlap=False, ahead=0.5), "post hook", "pre hook")
    assert_hooks_equal_lines(OkTopk(density=0.2), "post hook", "pre hook")


def check_a_rate_that_is_set_in_a_hook_of_a_round() -> None:
    needs(hvd.mpi_enabled() and hvd.size() == 1, "one rank over MPI, where a step has one round")
    assert_hooks_equal_lines(Partial(OkTopk(density=0.2)), "post hook")  # before it, the rate is already handed in


def check_a_step_that_calls_its_bases_has_one_rate_throughout() -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # PyTorch surrounds a class's step at the first object
    compression = StepAhead(OkTopk(density=1.0), overlap=False, ahead=0.5, gain=1.5)
    params, rates = parameters(), []

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            super().step()
            rates.append(self.param_groups[0]["lr"])

    optimizer = distribute(params, compression, Noting(params.values(), lr=0.1))
    descend(optimizer, loss_with(params, gradients(0)))
    factor = 0.75 if hvd.size() > 1 else 1.0
    assert rates == [0.1 * factor] * 2, rates
    assert optimizer.param_groups[0]["lr"] == 0.1


def check_ranks_with_different_rates_are_told_once() -> None:
    needs_ranks(hvd)
    for compression in (OkTopk(density=0.2), StepAhead(OkTopk(density=0.2))):
        params = parameters()
        optimizer = distribute(params, compression, lr=0.1)
        with logged() as lines:
            for step in range(4):
                if step == 1:
                    optimizer.param_groups[0]["lr"] = 0.05  # on all ranks: a schedule
                if step == 2:
                    optimizer.param_groups[0]["lr"] = 0.01 * (1 + hvd.rank())
                descend(optimizer, loss_with(params, gradients(step)))
            with shared_parameters(optimizer):
                pass
        assert [line for line in lines if "different learning rates at step 3" in line] == lines, lines
        assert len(lines) == 1, lines


def check_a_rank_that_begins_with_another_rate_is_told_at_once() -> None:
    """And a worker that joins an elastic job with the others' rate is not."""
    needs_ranks(hvd)
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.2), lr=0.1 * (1 + hvd.rank()))
    with logged() as lines:
        descend(optimizer, loss_with(params, gradients(0)))
    assert len(lines) == 1, lines
    assert "different learning rates at step 1" in lines[0]
