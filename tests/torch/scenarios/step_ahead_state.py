"""`compression=StepAhead(...)`: what the ranks share, and each rank's residual, are saved, loaded and changed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from horovod_oktopk import OptionError, PluginError
from tests.scenarios import SETS
from tests.scenarios.common import is_last, logged, needs_ranks, shared_folder
from tests.torch.library import OkTopk, StepAhead, gather_state_dict, hvd, shared_parameters, step_report
from tests.torch.scenarios.common import (
    assert_equal_everywhere,
    descend,
    distribute,
    flat,
    raised_everywhere,
    record_of,
)
from tests.torch.scenarios.step_ahead import (
    OPTIONS,
    assert_shared_is_equal,
    distributed,
    made,
    model_of,
    own_data,
    remembering,
    shared_of,
    train,
    trained,
)


def check_broadcast_first_as_every_script_does() -> None:
    model = model_of(seed=hvd.rank())
    optimizer = distributed(model, optimizer=torch.optim.Adam)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(3))
    assert_shared_is_equal(model, optimizer)


def check_weights_that_the_program_clips_stay_so_and_are_shared() -> None:
    model, optimizer = made(StepAhead(OkTopk(density=0.3), ahead=1))
    for step in range(30):
        train(model, optimizer, range(step, step + 1))
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)
    with shared_parameters(optimizer):
        assert max(p.abs().max().item() for p in model.parameters()) < 0.15
    assert_shared_is_equal(model, optimizer)


def check_a_model_that_is_loaded_in_a_block_which_was_opened_before_the_first_step() -> None:
    """Behind a step at learning rate 0, as torch.distributed.checkpoint takes one to have a state."""
    loaded = copy.deepcopy(model_of(seed=5).state_dict())
    model, optimizer = made(OPTIONS)
    with shared_parameters(optimizer):
        get_optimizer_state_dict(model, optimizer)
        messages = raised_everywhere(PluginError, lambda: train(model, optimizer, range(1)))
        assert "leave it before the next step" in messages[0]
        model.load_state_dict(loaded)
    shared = shared_of(model, optimizer)
    assert all(torch.equal(shared[name], loaded[name]) for name in loaded)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(3))
    assert np.array_equal(flat(shared_of(model, optimizer)), flat(loaded))
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, range(3))
    assert_shared_is_equal(model, optimizer)


def check_a_run_rolls_back_while_an_exchange_is_under_way() -> None:
    """Outside of shared_parameters, and in either order."""
    results = []
    for model_first in (True, False):
        model, optimizer = trained(3)
        with shared_parameters(optimizer):
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        pairs = list(zip((model, optimizer), saved, strict=True))
        for attempt in range(8):
            train(model, optimizer, range(3, 5 + attempt % 3))
            for each, state in pairs if model_first else pairs[::-1]:
                each.load_state_dict(copy.deepcopy(state))
        train(model, optimizer, range(3, 8))
        assert_shared_is_equal(model, optimizer)
        results.append(flat(shared_of(model, optimizer)))
    assert np.array_equal(results[0], results[1])


def check_an_elastic_state_saves_and_sends_what_all_ranks_share() -> None:
    for rank_0_alone in (False, True):
        model, optimizer = made()
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
        train(model, optimizer, range(4))
        expected = flat(shared_of(model, optimizer))
        state.save()
        saved = {name: value.clone() for name, value in state._handlers["model"]._saved_model_state.items()}
        assert np.array_equal(flat(saved), expected)
        train(model, optimizer, range(4, 6))
        if not rank_0_alone or hvd.rank() == 0:  # the others have what they have had, and get rank 0's
            state.restore()
        state.sync()
        assert_equal_everywhere(model.parameters())
        train(model, optimizer, range(4, 8))
        assert_shared_is_equal(model, optimizer)


def check_an_elastic_state_of_the_model_alone_restores_what_all_ranks_share() -> None:
    model, optimizer = made()
    state = hvd.elastic.TorchState(model=model)
    train(model, optimizer, range(4))
    state.save()
    expected, residual = flat(shared_of(model, optimizer)), record_of(optimizer)["residual"]
    train(model, optimizer, range(4, 7))
    state.restore()
    state.sync()
    assert np.array_equal(flat(dict(model.named_parameters())), expected)
    assert torch.equal(record_of(optimizer)["residual"], residual)
    train(model, optimizer, range(4, 6))
    assert_shared_is_equal(model, optimizer)


def check_a_model_that_is_loaded_outside_of_the_block_is_told() -> None:
    needs_ranks(hvd)
    model, optimizer = trained(3)
    best = copy.deepcopy(shared_of(model, optimizer))
    with logged() as messages:
        for step in range(3, 6):
            train(model, optimizer, range(step, step + 1))
            with shared_parameters(optimizer):
                model.load_state_dict(best)
            with shared_parameters(model):
                pass
    assert messages == []
    train(model, optimizer, range(6, 7))
    model.load_state_dict(best)
    with logged() as messages, shared_parameters(optimizer):
        assert not np.array_equal(flat(dict(model.named_parameters())), flat(best))
    [message] = messages
    assert "So a load, of a best model say, is undone" in message


def convolution(memory_format: torch.memory_format) -> torch.nn.Module:
    torch.manual_seed(0)
    return remembering(torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=memory_format))


def convolve(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        descend(optimizer, model(own_data(step, 2, 3, 8, 8)).square().mean())


def check_a_state_that_is_loaded_before_the_first_step_goes_on_after_the_next_block() -> None:
    model, optimizer = trained(4)
    with shared_parameters(optimizer):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(4, 8))
    expected = flat(shared_of(model, optimizer))
    model, optimizer = made()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    shared_of(model, optimizer)
    train(model, optimizer, range(4, 8))
    assert np.array_equal(flat(shared_of(model, optimizer)), expected)


def check_one_file_holds_all_ranks_also_in_another_memory_format() -> None:
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = convolution(memory_format)
        optimizer = distributed(model)
        convolve(model, optimizer, range(4))
        with shared_folder(hvd) as folder:
            with shared_parameters(optimizer):
                state = gather_state_dict(optimizer)
                if hvd.rank() == 0:
                    torch.save((model.state_dict(), state), folder / "all.pt")
            hvd.allgather_object("saved")
            weights, loaded = torch.load(folder / "all.pt", weights_only=True)
        resumed = convolution(torch.contiguous_format)
        again = distributed(resumed)
        with shared_parameters(again):
            again.load_state_dict(loaded)
            resumed.load_state_dict(weights)
        assert torch.equal(resumed.weight, model.weight.detach().contiguous()), "this rank's own, by index"
        convolve(model, optimizer, range(4, 6))
        assert_shared_is_equal(model, optimizer)


def check_a_layer_that_was_frozen_when_the_state_was_saved_thaws_before_it_is_loaded() -> None:
    for compression in (StepAhead(OkTopk(density=0.1)), OkTopk(density=0.1)):
        model, optimizer = made(compression)
        model[0].requires_grad_(False)
        train(model, optimizer, range(4))
        with shared_parameters(optimizer):
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        resumed, fresh = made(compression)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with shared_parameters(fresh):
                resumed.load_state_dict(saved[0])
                fresh.load_state_dict(saved[1])
            train(resumed, fresh, range(4, 6))
        assert any("frozen or thawed since: it has" in str(each.message) for each in caught)
        assert_shared_is_equal(resumed, fresh)
        with shared_parameters(fresh):
            assert step_report(fresh).step == 6


def check_a_rank_outside_the_process_set_has_no_part_of_a_state() -> None:
    """Nor has a parameter to be one that could be reduced, where it is the rank's own."""
    needs_ranks(hvd)
    model, optimizer = trained(3, process_set=SETS[0])
    state = hvd.broadcast_object(gather_state_dict(optimizer), root_rank=0)
    fresh, again = made(process_set=SETS[0])
    before = flat(dict(fresh.named_parameters()))
    with shared_parameters(again):
        again.load_state_dict(state)
    if is_last(hvd):
        assert np.array_equal(flat(dict(fresh.named_parameters())), before)
        complex_ = {"complex": torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))}
        alone = distribute(complex_, OPTIONS, process_set=SETS[0])
        descend(alone, complex_["complex"].abs().sum())
        assert torch.equal(complex_["complex"].detach(), torch.zeros(3, dtype=torch.complex64))


def check_what_cannot_work_is_refused_before_anything_is_sent() -> None:
    model = model_of()
    half = {name: torch.nn.Parameter(p.detach().bfloat16()) for name, p in model.named_parameters()}
    optimizer = distribute(half, OPTIONS)
    raised_everywhere(PluginError, optimizer.step)
    wide = torch.nn.Parameter(torch.zeros(3, 1).expand(3, 4))
    raised_everywhere(PluginError, distribute({"wide": wide}, OPTIONS).step)
    raised_everywhere(PluginError, lambda: distributed(model_of(), op=hvd.Adasum))
    optimizer = distributed(model_of())
    for group in optimizer.param_groups:
        del group["lr"]
    if hvd.size() > 1:
        raised_everywhere(OptionError, optimizer.step)
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    with shared_parameters(optimizer):
        raised_everywhere(PluginError, optimizer.step)
    train(model, optimizer, range(1, 2))
    assert_shared_is_equal(model, optimizer)
