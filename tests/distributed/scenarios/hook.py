"""The communication hook of DistributedDataParallel, held against the optimizer around the plain model."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_oktopk import AgreementError, Partial, PluginError
from horovod_oktopk.distributed import (
    DistributedOptimizer,
    OkTopk,
    OkTopkState,
    StepAhead,
    TopkA,
    oktopk_hook,
    step_report,
)
from tests.scenarios.common import needs_ranks
from tests.torch.library import hvd
from tests.torch.scenarios.common import assert_equal_everywhere, everywhere, flat, raised_everywhere

OPTIONS = OkTopk(density=0.05)
SMALL = 0.01
"""Megabytes of a bucket: the model has several, which DDP arranges anew after the first pass."""


class Net(torch.nn.Module):
    """A part of it goes unused in every other step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
        self.first, self.second = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        found = self.layers(x)
        return self.first(found) + self.second(found) if both else self.first(found)


class InDDP:
    """Training with the hook."""

    def __init__(self, compression: Any = OPTIONS, scaler: Any = None, **arguments: Any) -> None:
        self.net = Net()
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=SMALL, **arguments)
        self.state = OkTopkState(None, compression, self.net.named_parameters(), scaler)
        self.model.register_comm_hook(self.state, oktopk_hook)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.quiet = self.model.no_sync

    def report(self) -> Any:
        return self.state.report


class Plain:
    """Training with the optimizer."""

    def __init__(self, compression: Any = OPTIONS) -> None:
        self.net = self.model = Net()
        self.optimizer = DistributedOptimizer(torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9),
                                              self.net.named_parameters(), compression)
        self.quiet = nullcontext

    def report(self) -> Any:
        return step_report(self.optimizer)


def loss_of(model: Any, step: int, both: bool = True) -> torch.Tensor:
    torch.manual_seed(100 * step + hvd.rank())
    return model(torch.randn(16, 20), both).square().mean()


def train(run: Any, steps: range, passes: int = 1, both: Callable[[int], bool] = lambda step: True,
          ) -> dict[str, torch.Tensor]:
    for step in steps:
        run.optimizer.zero_grad()
        with run.quiet():
            for each in range(passes - 1):
                loss_of(run.model, 1000 * (each + 1) + step, both(step)).backward()
        loss_of(run.model, step, both(step)).backward()
        run.optimizer.step()
    assert_equal_everywhere(run.net.parameters())
    return {name: p.detach().clone() for name, p in run.net.named_parameters()}


def assert_same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert (flat(ours) == flat(plain)).all()


def check_the_bits_are_the_optimizers() -> None:
    for compression in (OPTIONS, TopkA(density=0.05)):
        ours, plain = InDDP(compression), Plain(compression)
        assert_same(train(ours, range(8)), train(plain, range(8)))
        assert ours.report().bytes_sent == plain.report().bytes_sent
        assert ours.report().step == 8


def check_accumulated_passes() -> None:
    for views in (False, True):
        ours = train(InDDP(gradient_as_bucket_view=views), range(6), passes=2)
        assert_same(ours, train(Plain(), range(6), passes=2))


def check_parameters_that_some_steps_do_not_use() -> None:
    def alternates(step: int) -> bool:
        return step % 2 == 0

    def alternates_on_rank_0(step: int) -> bool:
        return step % 2 == 0 and hvd.rank() == 0

    for both in (alternates, alternates_on_rank_0):
        expected = train(Plain(), range(6), both=both)
        for views in (False, True):
            ours = InDDP(find_unused_parameters=True, gradient_as_bucket_view=views)
            assert_same(train(ours, range(6), both=both), expected)


def check_a_loss_scale_is_not_kept_in_the_residual() -> None:
    """Scale by powers of two, which change no bit, and differ by step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    ours, plain = InDDP(scaler=scaler), Plain()
    for step in range(6):
        ours.optimizer.zero_grad()
        scaler.scale(loss_of(ours.model, step)).backward()
        scaler.step(ours.optimizer)
        scaler.update()
    assert scaler.get_scale() > 1024
    assert_same(dict(ours.net.named_parameters()), train(plain, range(6)))


def check_options_that_differ_raise_in_backward_on_all_ranks() -> None:
    needs_ranks(hvd)
    run = InDDP(OkTopk(density=0.05 if hvd.rank() else 0.1))
    messages = raised_everywhere(AgreementError, lambda: loss_of(run.model, 0).backward())
    assert "density" in messages[0]


def check_a_state_goes_on() -> None:
    whole, first = InDDP(), InDDP()
    expected = train(whole, range(8))
    train(first, range(4))
    state = everywhere(first.state.state_dict())[0]
    second = InDDP()
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.state.load_state_dict(state)
    assert_same(train(second, range(4, 8)), expected)


def check_a_state_of_other_parameters_is_refused() -> None:
    """Thaw a layer, and make DDP anew: the old state would leave the layer's gradients as each rank's own."""
    ours, plain = InDDP(), Plain()
    for run in (ours, plain):
        run.net.second.requires_grad_(False)
    ours.model = DistributedDataParallel(ours.net, bucket_cap_mb=SMALL)
    ours.model.register_comm_hook(ours.state, oktopk_hook)
    train(ours, range(4))
    train(plain, range(4))
    for run in (ours, plain):
        run.net.second.requires_grad_(True)
        run.optimizer.zero_grad()
    old, anew = ours.state, OkTopkState(None, OPTIONS, ours.net.named_parameters())
    for state in (old, anew):
        ours.model = DistributedDataParallel(ours.net, bucket_cap_mb=SMALL)
        ours.model.register_comm_hook(state, oktopk_hook)
        if state is old:
            messages = raised_everywhere(PluginError, lambda: loss_of(ours.model, 4).backward())
            assert "make an OkTopkState for each DistributedDataParallel" in messages[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anew.load_state_dict(old.state_dict())
        assert_same(train(ours, range(4, 8)), train(plain, range(4, 8)))


def check_a_state_of_other_ranks_is_refused() -> None:
    needs_ranks(hvd)
    alone = [dist.new_group([rank]) for rank in range(hvd.size())][hvd.rank()]
    net = torch.nn.Linear(6, 2)
    model, beside = (DistributedDataParallel(net, process_group=group) for group in (alone, None))
    beside.register_comm_hook(OkTopkState(None, OPTIONS, net.named_parameters()), oktopk_hook)
    beside(torch.randn(3, 6)).sum().backward()
    model.register_comm_hook(OkTopkState(None, OPTIONS, net.named_parameters()), oktopk_hook)
    messages = raised_everywhere(PluginError, lambda: model(torch.randn(3, 6)).sum().backward())
    assert f"has the ranks [{hvd.rank()}]" in messages[hvd.rank()], messages


def check_what_a_hook_cannot_do_is_refused() -> None:
    for compression in (StepAhead(OPTIONS), Partial(OPTIONS), None, "oktopk"):
        messages = raised_everywhere(PluginError, lambda given=compression: OkTopkState(compression=given))
        assert "leave_gradients" in messages[0]


def check_a_model_with_the_hook_is_copied_and_pickled() -> None:
    """Averages of weights copy it; the copy has what the model computes, and no residual."""
    run = InDDP()
    train(run, range(2))
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    for each in (averaged.module, torch.load(file, weights_only=False)):
        assert all(torch.equal(p, q) for p, q in zip(each.parameters(), run.model.parameters(), strict=True))
    averaged.update_parameters(run.model)
    train(run, range(2, 4))
