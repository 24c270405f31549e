"""`StepAhead` where each host is one worker: Horovod averages gradients over its ranks, which take the same steps."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_oktopk import AgreementError, PluginError
from horovod_oktopk.torch import OkTopk, StepAhead, gather_state_dict, shared_parameters, step_report
from tests.scenarios.common import is_last, needs, needs_ranks
from tests.scenarios.hosts import host_sizes, set_of
from tests.torch.scenarios.common import flat, raised_everywhere
from tests.torch.scenarios.step_ahead import assert_shared_is_equal, distributed, loss_of, model_of, shared_of, train

STEPS = 6


def options(length: int, **others: Any) -> StepAhead:
    return StepAhead(OkTopk(density=0.05, value_dtype=None, hierarchical=length), **others)


def one_rank_a_host(length: int, overlap: bool) -> np.ndarray:
    """w of a run among the first ranks of all hosts, each with the averages of its host's gradients; there alone."""
    firsts = list(range(0, hvd.size(), length))
    only = set_of(hvd, tuple(firsts))
    model = model_of()
    optimizer = distributed(model, StepAhead(OkTopk(density=0.05, value_dtype=None), overlap=overlap),
                            process_set=only)
    if hvd.rank() in firsts:
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank in range(hvd.rank(), hvd.rank() + length):
                loss_of(model, step, rank).backward()
            for p in model.parameters():
                p.grad *= 1 / length
            optimizer.step()
    return flat(shared_of(model, optimizer)) if hvd.rank() in firsts else np.empty(0)


def check_gives_the_bits_of_one_rank_a_host() -> None:
    """To rounding, where Horovod adds up more than two gradients in an order of its own."""
    needs_ranks(hvd)
    for length in host_sizes(hvd.size()):
        for overlap in (True, False):
            model = model_of()
            optimizer = distributed(model, options(length, overlap=overlap))
            train(model, optimizer, range(STEPS))
            assert_shared_is_equal(model, optimizer)
            expected = one_rank_a_host(length, overlap)
            if hvd.rank() % length == 0:
                found = flat(shared_of(model, optimizer))
                assert np.allclose(found, expected, rtol=0, atol=0 if length == 2 else 1e-5), (length, overlap)


def check_all_of_it_equals_horovods_dense_to_rounding() -> None:
    for length in (*host_sizes(hvd.size()), True):
        scheme = OkTopk(density=1.0, value_dtype=None, hierarchical=length)
        results = []
        for compression in (hvd.Compression.none, StepAhead(scheme, ahead=1, overlap=False)):
            model = model_of(dtype=torch.float64)
            optimizer = distributed(model, compression)
            train(model, optimizer, range(8))
            results.append(flat(shared_of(model, optimizer)) if compression is not hvd.Compression.none
                           else flat(dict(model.named_parameters())))
        assert np.allclose(*results, rtol=0, atol=1e-9), np.abs(results[0] - results[1]).max()


def check_one_rank_alone_evaluates_and_saves() -> None:
    needs_ranks(hvd)
    model = model_of()
    optimizer = distributed(model, StepAhead(OkTopk(density=0.05, hierarchical=hvd.size())))
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        if is_last(hvd):
            with shared_parameters(optimizer):
                assert loss_of(model, 99).item() > 0
                assert optimizer.state_dict()["horovod_oktopk"]
    assert_shared_is_equal(model, optimizer)
    assert step_report(optimizer).payload_bytes()[0] == 0, "nothing leaves the host"


def check_a_resumed_run_has_the_same_bits() -> None:
    needs_ranks(hvd)
    model = model_of()
    optimizer = distributed(model, options(hvd.size()))
    train(model, optimizer, range(4))
    with shared_parameters(optimizer):
        weights, state = copy.deepcopy((model.state_dict(), gather_state_dict(optimizer)))
    resumed = model_of(seed=5)
    other = distributed(resumed, options(hvd.size()))
    with shared_parameters(other):
        resumed.load_state_dict(weights)
        other.load_state_dict(state)
    for each, its in ((model, optimizer), (resumed, other)):
        train(each, its, range(4, 8))
    assert flat(shared_of(model, optimizer)).tobytes() == flat(shared_of(resumed, other)).tobytes()
    assert flat(dict(model.named_parameters())).tobytes() == flat(dict(resumed.named_parameters())).tobytes()


def check_a_gradient_that_is_not_finite_is_skipped_by_all_of_its_host() -> None:
    needs_ranks(hvd)
    for length in host_sizes(hvd.size()):
        model = model_of()
        optimizer = distributed(model, options(length))
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.synchronize()
        if hvd.rank() // length == (hvd.size() - 1) // length:  # averaged, it is that of all of them
            next(model.parameters()).grad[0, 0] = float("nan")
        with optimizer.skip_synchronize():
            optimizer.step()
        train(model, optimizer, range(4, 7))
        assert_shared_is_equal(model, optimizer)


def check_ranks_that_drift_apart_are_told() -> None:
    needs_ranks(hvd)
    model = model_of()
    optimizer = distributed(model, options(hvd.size(), overlap=False))
    train(model, optimizer, range(3))

    def drift() -> None:
        if is_last(hvd):
            with torch.no_grad():
                for p in model.parameters():
                    p += 0.5
        train(model, optimizer, range(3, 4))

    messages = raised_everywhere(AgreementError, drift)
    assert all("which all ranks of a host must change alike" in message for message in messages)


def check_loss_scaling_needs_averaged_gradients() -> None:
    needs_ranks(hvd)
    model = model_of()
    optimizer = distributed(model, options(hvd.size()))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(PluginError, match=r"optimizer.synchronize\(\)"):
        scaler.step(optimizer)
    for step in range(1, 4):
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
    optimizer.synchronize()
    assert_shared_is_equal(model, optimizer)


def check_a_rank_that_loads_or_saves_alone_is_told() -> None:
    needs_ranks(hvd)
    for length in host_sizes(hvd.size()):
        model = model_of()
        optimizer = distributed(model, options(length, overlap=False))
        train(model, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict())

        def load_alone(model: torch.nn.Module = model, optimizer: Any = optimizer, state: Any = state) -> None:
            if is_last(hvd):
                optimizer.load_state_dict(state)
            train(model, optimizer, range(2, 3))

        messages = raised_everywhere(AgreementError, load_alone)
        assert len(set(messages)) == 1


def check_ranks_of_which_some_have_no_hosts_are_told() -> None:
    needs_ranks(hvd)
    model = model_of()
    optimizer = distributed(model, options(hvd.size() if is_last(hvd) else 1))
    messages = raised_everywhere(AgreementError, lambda: train(model, optimizer, range(1)))
    assert all("different options hierarchical" in message for message in messages)


def check_parameters_that_join_are_averaged_too() -> None:
    """Unfrozen, or of a new group."""
    needs_ranks(hvd)
    model, more = model_of(), torch.nn.Linear(4, 4)
    torch.nn.init.ones_(more.weight)
    torch.nn.init.zeros_(more.bias)
    model[0].requires_grad_(False)
    optimizer = distributed(model, options(hvd.size()))
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": more.parameters(), "lr": 0.1})
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        torch.nn.functional.mse_loss(more(model(inputs)), torch.sin(inputs[:, :4])).backward()
        optimizer.step()
    own = np.concatenate([p.detach().numpy().ravel() for p in (*model.parameters(), *more.parameters())])
    assert len(set(hvd.allgather_object(own.tobytes()))) == 1
    assert not torch.equal(more.weight, torch.ones(4, 4))


def check_a_state_of_rank_0_serves_its_whole_host() -> None:
    needs_ranks(hvd)
    model = model_of()
    optimizer = distributed(model, options(hvd.size()))
    train(model, optimizer, range(4))
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
    model = model_of()
    optimizer = distributed(model, options(hvd.size()))
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()


def check_hosts_of_one_rank_need_no_process_sets() -> None:
    results = []
    for scheme in (OkTopk(density=0.05, hierarchical=1), OkTopk(density=0.05)):
        model = model_of()
        optimizer = distributed(model, StepAhead(scheme), groups=2)
        train(model, optimizer, range(3))
        results.append(flat(shared_of(model, optimizer)).tobytes())
        if scheme.hierarchical:
            assert optimizer.process_set is hvd.global_process_set
    assert len(set(results)) == 1


def check_a_closure_is_refused() -> None:
    needs(hvd.size() > 1, "2 ranks")
    model = model_of()
    optimizer = distributed(model, options(hvd.size()))
    with pytest.raises(PluginError, match="without one, after loss.backward"):
        optimizer.step(lambda: loss_of(model, 0))
