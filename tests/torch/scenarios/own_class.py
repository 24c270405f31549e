"""An optimizer keeps what it has when it is distributed: state, hooks, schedulers; and what it cannot do is said."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from horovod_oktopk import PluginError
from horovod_oktopk.torch_base.registry import own_run_of
from tests.scenarios.common import DENSE, logged, needs_ranks
from tests.torch.library import OkTopk, StepAhead, hvd, shared_parameters, step_report
from tests.torch.scenarios.common import (
    assert_equal_everywhere,
    backward,
    descend,
    distribute,
    flat,
    gradients,
    loss_with,
    made,
    parameters,
    raised_everywhere,
    take_steps,
    total,
)


def check_a_synchronized_step_that_is_not_applied_is_dropped() -> None:
    """Programs drop a step if its norm is too large: the next step reduces gradients of its own."""
    for clear in (lambda optimizer, _: optimizer.zero_grad(), lambda _, params: [setattr(p, "grad", None)
                                                                               for p in params.values()]):
        params, optimizer = made(DENSE, op=hvd.Sum)
        backward(params, gradients(0))
        optimizer.synchronize()
        clear(optimizer, params)
        backward(params, gradients(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert np.array_equal(flat(params), -total(1))


def check_schedulers_and_hooks_from_before_go_on() -> None:
    """Also after a state was loaded, when PyTorch prepares the optimizer's class again."""
    for anew in (False, True):
        results = [trained_with_schedulers(distributes, anew) for distributes in (False, True)]
        assert np.array_equal(*results)


def trained_with_schedulers(distributes: bool, anew: bool) -> Any:
    """Train with a scheduler from before the optimizer is distributed, and perhaps with one made anew after that."""
    params, ran = parameters(), []
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    if distributes:
        assert distribute(params, DENSE, optimizer, op=hvd.Sum) is optimizer
    optimizer.load_state_dict(optimizer.state_dict())
    if anew:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            ranks = [hvd.rank()] if distributes else range(hvd.size())
            descend(optimizer, sum(loss_with(params, gradients(step, rank)) for rank in ranks))
            for scheduler in schedulers:
                scheduler.step()
    assert ran == ["before"] * 4
    return flat(params)


def check_a_step_that_is_compiled_runs_as_it_is() -> None:
    results = []
    for compiled in (False, True):
        params, optimizer = made(StepAhead(OkTopk(density=0.1)))
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(4):
            optimizer.zero_grad()
            backward(params, gradients(number))
            step()
        with shared_parameters(optimizer):
            results.append(flat(params))
    assert np.array_equal(*results)


def check_a_step_of_gradients_that_were_not_reduced_warns() -> None:
    """Before any was reduced, and later: each rank would train for itself without a word."""
    for compression, warned in ((DENSE, hvd.size()), (StepAhead(DENSE), 0)):
        params, optimizer = made(compression)
        for step in range(2):
            backward(params, gradients(step, 0))  # the same on all ranks, which must meet with the same parameters
            with warnings.catch_warnings(record=True) as found, optimizer.skip_synchronize():
                warnings.simplefilter("always")
                optimizer.step()
            assert any("are not reduced" in str(each.message) for each in found) == (warned > 1)
            optimizer.zero_grad()
            take_steps(optimizer, params, step)


def check_reduced_gradients_may_be_replaced() -> None:
    """By others, or by None: they are reduced still, and neither a warning nor a GradScaler's refusal comes."""
    params, optimizer = made(DENSE, op=hvd.Sum)
    scaler, first = torch.amp.GradScaler("cpu", init_scale=4.0), params[min(params)]
    scaler.scale(loss_with(params, gradients(0))).backward()
    scaler.unscale_(optimizer)
    optimizer.synchronize()
    for p in params.values():
        p.grad = None if p is first else 2 * p.grad
    with optimizer.skip_synchronize(), warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
    expected = -2 * total(0)
    expected[:first.numel()] = 0
    assert np.array_equal(flat(params), expected)


def check_gradients_that_were_reduced_and_cleared_may_come_again() -> None:
    """Also if their memory stays, as with set_to_none=False."""
    params, optimizer = made(DENSE, op=hvd.Sum)
    for step in (0, 2):
        backward(params, gradients(step))
        optimizer.synchronize()
        if step:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.zero_grad(set_to_none=False)
            assert not own_run_of(optimizer).is_reduced
    assert step_report(optimizer).step == 2


def check_a_step_that_failed_after_its_reduction_and_comes_again_warns() -> None:
    params, optimizer = made(DENSE, op=hvd.Sum)

    def fail(*_: Any) -> None:
        raise KeyError

    hook = optimizer.register_step_pre_hook(fail)
    backward(params, gradients(0))
    with pytest.raises(KeyError):
        optimizer.step()
    hook.remove()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(optimizer, params, 1)
    assert_equal_everywhere(params.values())


class Clearing(torch.optim.SGD):
    """Its zero_grad has no arguments, and leaves zeros."""

    def zero_grad(self) -> None:
        super().zero_grad(set_to_none=False)


def check_zero_grad_is_the_optimizers_own() -> None:
    params = parameters()
    optimizer = distribute(params, DENSE, Clearing(params.values(), lr=1.0))
    take_steps(optimizer, params, 0)
    optimizer.zero_grad()
    assert all(not p.grad.any() for p in params.values())


def check_an_optimizer_without_pytorchs_hooks_is_refused() -> None:
    """Timm's Lookahead is one of these; it has those of steps, which are not run."""
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
            self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, {}, {}

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    params = parameters()
    inner = torch.optim.SGD(params.values(), lr=1.0)
    around = Around(inner)
    messages = raised_everywhere(PluginError, lambda: distribute(params, DENSE, around))
    assert "Around(DistributedOptimizer(inner optimizer, ...))" in messages[0]
    assert type(around) is Around
    around.__class__ = type("Averaging", (Around,), {"eval": None, "train": None})
    for compression, words in ((DENSE, "does not call Optimizer.__init__"), (StepAhead(DENSE), "use OkTopk alone")):
        assert words in raised_everywhere(PluginError, lambda given=compression: distribute(params, given, around))[0]
    around.__class__ = type("AcceleratedOptimizer", (Around,), {"eval": None, "train": None})  # as Accelerate has it
    for compression in (DENSE, StepAhead(DENSE)):
        message = raised_everywhere(PluginError, lambda given=compression: distribute(params, given, around))[0]
        assert "before accelerator.prepare" in message
    distribute(params, DENSE, inner, op=hvd.Sum)
    take_steps(Around(inner), params, 0)
    assert np.array_equal(flat(params), -total(0))


class Wrapper:
    """An optimizer's wrapper as Lightning and Fabric make theirs: of its class as well, without its attributes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.__class__ = type(f"Wrapped{type(optimizer).__name__}", (type(self), type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def check_wrappers_that_derive_from_the_optimizers_class() -> None:
    params, optimizer = made(DENSE, op=hvd.Sum)
    wrapper = Wrapper(optimizer)
    for step in range(3):
        descend(wrapper, loss_with(params, gradients(step)))
    wrapper.zero_grad()
    backward(params, gradients(3))
    wrapper.synchronize()
    with wrapper.skip_synchronize():
        wrapper.step()
    assert np.array_equal(flat(params), -total(*range(4)))


def copies_of(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield copies of a model with a copy of its optimizer; with one made of its class; and with one from a file."""
    yield copy.deepcopy((model, optimizer))
    of_class = copy.deepcopy(model)
    yield of_class, type(optimizer)(of_class.parameters(), lr=0.1)
    yield pickle.loads(pickle.dumps((model, optimizer)))


def check_a_copy_takes_no_step_until_it_is_distributed() -> None:
    for compression in (DENSE, StepAhead(OkTopk(density=0.1))):
        model = torch.nn.Linear(4, 3)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = distribute(model, compression, torch.optim.SGD(model.parameters(), lr=0.1))
        for other, copied in copies_of(model, optimizer):
            assert "give it to DistributedOptimizer" in raised_everywhere(PluginError, copied.step)[0]
            again = distribute(other, compression, copied)
            before = flat(dict(other.named_parameters()))
            descend(again, other(torch.ones(2, 4)).sum())
            with shared_parameters(again):
                assert_equal_everywhere(other.parameters())
                assert not np.array_equal(flat(dict(other.named_parameters())), before)


def check_a_scheduler_can_be_pickled() -> None:
    params = parameters()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(distribute(params, DENSE), 0.9)
    assert pickle.loads(pickle.dumps(scheduler)).gamma == 0.9


def check_gradients_that_are_cleared_for_ever_without_a_step_warn() -> None:
    params, optimizer = made(DENSE)
    with logged() as lines:
        for _ in range(150):
            optimizer.zero_grad()
    assert len([line for line in lines if "step() was never called" in line]) == 1
    params, optimizer = made(DENSE)
    take_steps(optimizer, params, 0)
    with logged() as lines:
        for _ in range(150):
            optimizer.zero_grad()
    assert not lines, params


def check_stock_horovods_checks_stay() -> None:
    params = parameters()
    for text, arguments in (("unique", {"named_parameters": [("a", p) for p in params.values()]}),
                            ("not named", {"named_parameters": list(params.items())[1:]}),
                            ("tuples", {"named_parameters": list(params.values())}),
                            ("backward_passes_per_step", {"backward_passes_per_step": 0}),
                            ("gradient_predivide_factor", {"gradient_predivide_factor": 2.0, "op": hvd.Sum})):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), compression=DENSE, **arguments)


def check_a_state_of_rank_0_alone_is_broadcast() -> None:
    """Other ranks take one plain step of zeros for it, in which weight decay does not move their parameters."""
    for compression in (DENSE, StepAhead(OkTopk(density=0.1))):
        for is_wrapped_before in (False, True):
            params, hooked = parameters(), []
            for p in params.values():
                torch.nn.init.constant_(p, 1.0 + hvd.rank())
            optimizer = torch.optim.AdamW(params.values(), lr=0.5, weight_decay=0.5)
            if is_wrapped_before:
                optimizer = distribute(params, compression, optimizer)
            if hvd.rank() == 0:
                alike = [p.detach().clone().requires_grad_(True) for p in params.values()]
                donor = torch.optim.AdamW(alike, lr=0.5, weight_decay=0.5)
                sum(p.sum() for p in alike).backward()
                donor.step()
                optimizer.load_state_dict(donor.state_dict())
            if not is_wrapped_before:
                optimizer = distribute(params, compression, optimizer)
            optimizer.register_step_post_hook(lambda *_, hooked=hooked: hooked.append(1))
            hvd.broadcast_parameters(params, root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert all(torch.equal(p, torch.ones_like(p)) for p in params.values()), "parameters have moved"
            assert not hooked
            assert_equal_everywhere(optimizer.state[p]["exp_avg"] for p in params.values())
            take_steps(optimizer, params, 1)
            with shared_parameters(optimizer):
                assert_equal_everywhere(params.values())


class Failing(torch.optim.SGD):
    """SGD whose step may be told to fail."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise RuntimeError("the local step fails")
        return super().step(closure)


def check_an_error_in_the_local_step_leaves_the_learning_rate_and_the_next_step() -> None:
    for options in (OkTopk(density=0.2), StepAhead(OkTopk(density=0.2), ahead=0.5, overlap=False)):
        params = parameters()
        optimizer = distribute(params, options, Failing(params.values(), lr=0.1))
        take_steps(optimizer, params, 0)
        before = flat(params)
        for fails in (True, False):
            optimizer.fails = fails
            if fails:
                raised_everywhere(RuntimeError, lambda made=(optimizer, params): take_steps(*made, 1))
                assert np.array_equal(flat(params), before)
            else:
                take_steps(optimizer, params, 2)
            assert optimizer.param_groups[0]["lr"] == 0.1
        with shared_parameters(optimizer):
            assert_equal_everywhere(params.values())
            assert not np.array_equal(flat(params), before)


def check_a_step_of_zeros_at_rate_0_is_a_step_like_any_other() -> None:
    """Check a warm-up from 0, in whose first step the last rank has nothing to learn: all take it together."""
    needs_ranks(hvd)
    for compression in (OkTopk(density=0.1), StepAhead(OkTopk(density=0.1))):
        params, optimizer = made(compression)
        optimizer.param_groups[0]["lr"] = 0.0
        for step in range(3):
            grads = gradients(step)
            if step == 0 and hvd.rank() == hvd.size() - 1:
                grads = {name: torch.zeros_like(gradient) for name, gradient in grads.items()}
            descend(optimizer, loss_with(params, grads))
            optimizer.param_groups[0]["lr"] = 1.0
        with shared_parameters(optimizer):
            assert step_report(optimizer).step == 3
            assert_equal_everywhere(params.values())
