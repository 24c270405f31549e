"""An optimizer keeps what it has when it is distributed: state, hooks, schedulers; and what it cannot do is said."""

from __future__ import annotations

import copy
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_oktopk import PluginError
from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters
from tests.scenarios.common import DENSE
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
    results = []
    for distributes in (False, True):
        params, ran = parameters(), []
        optimizer = torch.optim.SGD(params.values(), lr=1.0)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        optimizer.register_step_pre_hook(lambda *_, ran=ran: ran.append("before"))
        if distributes:
            assert distribute(params, DENSE, optimizer, op=hvd.Sum) is optimizer
        optimizer.load_state_dict(optimizer.state_dict())
        after = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                ranks = [hvd.rank()] if distributes else range(hvd.size())
                descend(optimizer, sum(loss_with(params, gradients(step, rank)) for rank in ranks))
                before.step()
                after.step()
        assert ran == ["before"] * 4
        results.append(flat(params))
    assert np.array_equal(*results)


def check_a_copy_says_what_to_do() -> None:
    params = parameters()
    copied = copy.deepcopy(distribute(params, DENSE))
    assert "make a plain optimizer" in raised_everywhere(PluginError, copied.step)[0]


def check_a_parameter_that_joins_after_the_first_step_is_refused() -> None:
    """Its gradients would be each rank's own."""
    for join in (lambda optimizer, p: optimizer.add_param_group({"params": [p]}),
                 lambda _, p: p.requires_grad_(True)):
        params = parameters()
        params["d"].requires_grad_(False)
        optimizer = distribute(params, DENSE)
        take_steps(optimizer, params, 0)
        join(optimizer, params["d"] if join.__code__.co_varnames[0] == "_" else torch.nn.Parameter(torch.zeros(3)))
        assert "Make the optimizer anew" in raised_everywhere(PluginError, optimizer.step)[0]


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
    """Other ranks take one plain step of zeros for it; weight decay moves their parameters, as in stock Horovod."""
    params = parameters()
    for p in params.values():
        torch.nn.init.ones_(p)
    plain = torch.optim.SGD(params.values(), lr=1.0, momentum=0.5, weight_decay=0.1)
    if hvd.rank() == 0:
        backward(params, gradients(0, 0))
        plain.step()
    optimizer = distribute(params, DENSE, plain)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if hvd.rank() != 0:
        assert all(torch.equal(p, torch.full_like(p, 0.9)) for p in params.values())
    hvd.broadcast_parameters(params, root_rank=0)
    take_steps(optimizer, params, 1)
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
