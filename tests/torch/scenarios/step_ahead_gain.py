"""The gain of `compression=StepAhead(...)`: measured from the gradients that the optimizer is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.scenarios.step_ahead import ALONE
from tests.torch.library import Dense, StepAhead, hvd, step_report
from tests.torch.scenarios.common import assert_equal_everywhere, descend, distribute, flat
from tests.torch.scenarios.step_ahead import (
    OPTIONS,
    closure_of,
    loss_of,
    made,
    model_of,
    own_data,
    shared_of,
    trained,
)


def gain_after(steps: int, compression: Any = OPTIONS, optimizer: Any = torch.optim.Adam) -> Any:
    """Return the last report."""
    model, wrapped = trained(steps, compression, optimizer)
    assert_equal_everywhere(shared_of(model, wrapped).values())
    return step_report(wrapped)


def check_optimizers_that_normalize_take_longer_steps() -> None:
    for optimizer in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        assert (gain_after(3, optimizer=optimizer).gain > 1) == (hvd.size() > 1), "the ranks' data differ"


class Decaying(torch.optim.Optimizer):
    """An optimizer that decays weights, and says so as AdaBelief does, or as docs/guides/step_ahead.md has it."""

    def __init__(self, params: Any, says: str, in_groups: bool = False, fixed: bool = False,
                 what: int = True) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.5, "fixed_decay": fixed,
                                  **({says: what} if in_groups else {})})
        if not in_groups:
            setattr(self, says, what)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - (1 if group["fixed_decay"] else group["lr"]) * group["weight_decay"])


def named(name: str) -> Any:
    """Return a function that makes an optimizer that says nothing, but by the name of its class."""
    return lambda params: type(name, (Decaying,), {})(params, "nothing")


def check_weight_decay_is_as_without_a_gain() -> None:
    """Decay is decoupled here; gradients are zero, so nothing else moves."""
    for make in (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
                 lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True),
                 lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.5),
                 lambda p: Decaying(p, "weight_decouple"), lambda p: Decaying(p, "decoupled_weight_decay"),
                 lambda p: Decaying(p, "weight_decouple", in_groups=True),
                 lambda p: Decaying(p, "decouple", in_groups=True), lambda p: Decaying(p, "adam_w_mode", what=1),
                 *map(named, ("PagedAdamW8bit", "Adan", "AdEMAMix", "SOAP", "SophiaG")),
                 lambda p: Decaying(p, "weight_decouple", fixed=True)):
        found = []
        for gain in (None, 4.0):
            model = model_of()
            optimizer = distribute(model, StepAhead(Dense(), ahead=1, overlap=False, gain=gain),
                                   make(model.parameters()))
            for _ in range(3):
                descend(optimizer, sum(0 * p.sum() for p in model.parameters()))
            found.append(flat(shared_of(model, optimizer)))
            assert optimizer.param_groups[0]["weight_decay"] == 0.5
        assert not np.allclose(found[0], flat(dict(model_of().named_parameters()))), "it decays"
        assert np.allclose(*found, rtol=1e-6)


def check_adafactors_steps_have_the_coefficient_late_in_a_training_too() -> None:
    """Its rate is min(lr, 1/√t): λ is a factor of what is used, and weight decay goes by lr."""
    found = []
    for ahead in (1, 0.5):
        model = model_of()
        optimizer = distribute(model, StepAhead(Dense(), ahead=ahead, overlap=False, gain=None),
                               torch.optim.Adafactor(model.parameters(), lr=0.1, weight_decay=0.5))
        for step in range(4):
            optimizer.zero_grad()
            sum((p * torch.sin(p.detach() + step)).sum() for p in model.parameters()).backward()
            for state in optimizer.state.values():
                state["step"].fill_(40000.0 + step)
            optimizer.step()
        found.append(flat(shared_of(model, optimizer)))
    assert not np.allclose(found[0], flat(dict(model_of().named_parameters())), atol=1e-4), "it moves"
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def check_loss_scales_are_left_out_of_the_measurement() -> None:
    """Ranks have different ones; fused optimizers are given gradients that are scaled still."""
    expected = gain_after(4, compression=ALONE).noise_ratio
    for fused in (False, True):
        model = model_of()
        optimizer = distribute(model, ALONE, torch.optim.Adam(model.parameters(), lr=0.1, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**(8 + 3 * hvd.rank()))
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert np.isclose(step_report(optimizer).noise_ratio, expected, rtol=1e-3)


def check_what_a_closure_computes_is_measured() -> None:
    model, optimizer = made(ALONE, torch.optim.Adam)
    for step in range(4):
        optimizer.step(closure_of(model, optimizer, step))
    assert step_report(optimizer).gain == gain_after(4, compression=ALONE).gain


def check_a_sparse_gradient_is_measured_as_the_dense_one() -> None:
    ratios = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(50, 8, sparse=sparse)
        optimizer = distribute(table, ALONE, lr=0.1)
        for step in range(5):
            descend(optimizer, table(torch.tensor([3, 3, 7, 10 + hvd.rank(), 20 + step])).square().sum())
        ratios.append(step_report(optimizer).noise_ratio)
    assert np.isclose(*ratios), ratios
    assert (ratios[0] > 1) == (hvd.size() > 1)


def check_a_memory_format_changes_nothing() -> None:
    ratios = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(3, 5, 3).to(memory_format=memory_format)
        optimizer = distribute(layer, ALONE, torch.optim.Adam(layer.parameters(), lr=0.1))
        for step in range(3):
            descend(optimizer, layer(own_data(step, 2, 3, 6, 6)).square().sum())
        ratios.append(step_report(optimizer).noise_ratio)
    assert np.isclose(*ratios, rtol=1e-4), ratios
