"""`StepAhead` where each host is one worker: Horovod averages gradients over its ranks, which take the same steps."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch

from horovod_oktopk import AgreementError
from tests.scenarios.common import host_sizes, is_last, needs_ranks
from tests.torch.library import OkTopk, StepAhead, hvd, shared_parameters
from tests.torch.scenarios.common import assert_equal_everywhere, descend, flat, raised_everywhere
from tests.torch.scenarios.step_ahead import (
    assert_shared_is_equal,
    closure_of,
    distributed,
    loss_of,
    made,
    model_of,
    remembering,
    shared_of,
    train,
    trained,
)


def options(length: int, **others: Any) -> StepAhead:
    return StepAhead(OkTopk(density=0.05, value_dtype=None, hierarchical=length), **others)


def check_a_loss_scale_and_a_closure_leave_no_trace() -> None:
    """Scales of the ranks of a host may differ."""
    needs_ranks(hvd)
    results = []
    for how in ("plain", "scaled", "clipped", "closure"):
        model, optimizer = made(options(hvd.size()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + hvd.rank()),
                                      enabled=how in ("scaled", "clipped"))
        for step in range(4):
            if how == "closure":
                assert optimizer.step(closure_of(model, optimizer, step)).isfinite()
                continue
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if how == "clipped":
                scaler.unscale_(optimizer)
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize() if how == "clipped" else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update()
        assert_shared_is_equal(model, optimizer)
        results.append(flat(shared_of(model, optimizer)).tobytes())
    assert len(set(results)) == 1


def check_a_rank_that_loads_or_saves_alone_is_told() -> None:
    needs_ranks(hvd)
    for length in host_sizes(hvd.size()):
        model, optimizer = trained(2, options(length, overlap=False))
        state = copy.deepcopy(optimizer.state_dict())

        def load_alone(model: torch.nn.Module = model, optimizer: Any = optimizer, state: Any = state) -> None:
            if is_last(hvd):
                optimizer.load_state_dict(state)
            train(model, optimizer, range(2, 3))

        messages = raised_everywhere(AgreementError, load_alone)
        assert len(set(messages)) == 1


def check_parameters_that_join_are_shared_too() -> None:
    """Unfrozen, or of a new group; the ranks of a host have the same ones even outside of shared_parameters."""
    for length in sorted({1, hvd.size()}):
        model, more = model_of(), torch.nn.Linear(4, 4)
        torch.nn.init.ones_(more.weight)
        torch.nn.init.zeros_(more.bias)
        model[0].requires_grad_(False)
        optimizer = distributed(model, options(length))
        for step in range(6):
            if step == 2:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": more.parameters(), "lr": 0.1})
            descend(optimizer, loss_of(torch.nn.Sequential(model, more), step))
        with shared_parameters(optimizer) if length == 1 else contextlib.nullcontext():
            assert_equal_everywhere([*model.parameters(), *more.parameters()])
            assert not torch.equal(more.weight, torch.ones(4, 4))


def check_a_state_of_rank_0_serves_its_whole_host() -> None:
    needs_ranks(hvd)
    model, optimizer = trained(4, options(hvd.size()))
    with shared_parameters(optimizer):
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    state = hvd.broadcast_object(state, 0, name="state")
    resumed = model_of(seed=5)
    other = distributed(resumed, options(hvd.size()))
    with shared_parameters(other):
        resumed.load_state_dict(weights)
        other.load_state_dict(state)
    assert flat(dict(model.named_parameters())).tobytes() == flat(dict(resumed.named_parameters())).tobytes()
    train(resumed, other, range(4, 6))
    assert_shared_is_equal(resumed, other)


def check_stock_horovods_warning_stays() -> None:
    needs_ranks(hvd)
    model, optimizer = made(options(hvd.size()))
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()


def check_hosts_of_one_rank_need_no_process_sets() -> None:
    results = []
    for scheme in (OkTopk(density=0.05, hierarchical=1), OkTopk(density=0.05)):
        model, optimizer = trained(3, StepAhead(scheme), groups=2)
        results.append(flat(shared_of(model, optimizer)).tobytes())
    assert len(set(results)) == 1


def check_ranks_of_a_host_that_cannot_reduce_together_are_told() -> None:
    """Before their gradients meet, which would end the process, or hang. Other hosts hear of it one step later."""
    needs_ranks(hvd)
    for length in host_sizes(hvd.size()):
        for before in (0, 2):
            model, optimizer = trained(before, options(length))
            if is_last(hvd):
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
            raised_everywhere(AgreementError, partial(train, model, optimizer, range(before, before + 2)))


def check_a_sparse_gradient_that_some_ranks_of_a_host_lack() -> None:
    for length in host_sizes(hvd.size()):
        for lacking in (0, 2):
            torch.manual_seed(0)
            model = remembering(torch.nn.ModuleList([torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 1)]))
            optimizer = distributed(model, options(length), optimizer=partial(torch.optim.SGD, momentum=0))
            for step in range(4):
                optimizer.zero_grad()
                has_none = is_last(hvd) and step == lacking
                inputs = torch.ones(1, 4) if has_none else model[0](torch.tensor([hvd.rank(), step]))
                model[1](inputs).sum().backward()
                optimizer.step()
            assert_shared_is_equal(model, optimizer)
