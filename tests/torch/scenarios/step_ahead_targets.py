"""Optimizers and models that `shared_parameters` and its like take; and several optimizers of one model."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from horovod_oktopk import PluginError
from horovod_oktopk.torch_base.registry import runs_over
from tests.scenarios.common import logged, needs_ranks
from tests.torch.library import (
    Dense,
    OkTopk,
    StepAhead,
    gather_state_dict,
    hvd,
    set_density,
    shared_parameters,
    step_report,
    synchronize_replicas,
)
from tests.torch.scenarios.common import (
    assert_equal_everywhere,
    distribute,
    flat,
    parameters,
    raised_everywhere,
    take_steps,
)
from tests.torch.scenarios.step_ahead import (
    OPTIONS,
    assert_shared_is_equal,
    distributed,
    loss_of,
    model_of,
    shared_of,
    train,
    trained,
)


class Wrapped(torch.nn.Module):
    """Module over another one's parameters, like that of torch.compile and DataParallel."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model


class WrappedOptimizer:
    """Wrapper like that of Accelerate and Lightning."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def inside(model: torch.nn.Module, *targets: Any) -> bytes:
    """Return what the model holds inside `shared_parameters(*targets)`."""
    with shared_parameters(*targets):
        return flat(dict(model.named_parameters())).tobytes()


def check_models_and_lists_serve_as_the_optimizer_does() -> None:
    model, other = model_of(), model_of(seed=1)
    optimizer = distributed(model)
    train(model, optimizer, range(3))
    shared = flat(shared_of(model, optimizer))
    own = flat(dict(model.named_parameters()))  # once what was under way is applied
    assert hvd.size() == 1 or own.tobytes() != shared.tobytes(), "between steps ranks have parameters of their own"
    for target in (model, [optimizer], (model,), Wrapped(model), WrappedOptimizer(optimizer), model[0],
                   torch.compile(model), [[model], optimizer]):
        assert inside(model, target) == shared.tobytes(), target
        assert inside(model, other, target) == shared.tobytes()
        assert flat(dict(model.named_parameters())).tobytes() == own.tobytes()
    assert_equal_everywhere([torch.from_numpy(shared)])


def check_a_model_with_two_optimizers_is_shared_as_a_whole() -> None:
    model = model_of()
    halves = [distribute(part, OPTIONS, lr=0.1) for part in (model[0], model[2])]
    for step in range(3):
        for half in halves:
            half.zero_grad()
        loss_of(model, step).backward()
        for half in halves:
            half.step()
    with shared_parameters(model):
        assert_equal_everywhere(model.parameters())


def check_what_trains_without_step_ahead_is_left_alone() -> None:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for target in (plain, distributed(model, OkTopk(density=0.1)), model, [], ()):
        before = flat(dict(model.named_parameters())).tobytes()
        assert inside(model, target) == before
        synchronize_replicas(target)


def check_what_is_neither_an_optimizer_nor_a_model_is_refused() -> None:
    model, optimizer = trained(1)
    for wrong, name in ((None, "NoneType"), ([None], "NoneType"), ({"model": model}, "dict"),
                        (torch.optim.SGD, "type"), (next(model.parameters()), "Parameter"),
                        (model.state_dict(), "OrderedDict")):
        for function in (partial(inside, model), synchronize_replicas):
            message = raised_everywhere(PluginError, partial(function, wrong))[0]
            assert f"got {name}" in message
            assert "(optimizer)" in message
        for function in (step_report, gather_state_dict, partial(set_density, density=0.1)):
            raised_everywhere(PluginError, partial(function, wrong))
    raised_everywhere(PluginError, partial(gather_state_dict, [optimizer]))


def check_an_optimizer_that_is_distributed_already_is_refused() -> None:
    model = model_of()
    for compression in (OPTIONS, OkTopk()):
        optimizer = distributed(model, compression)
        for again in (compression, hvd.Compression.none):
            messages = raised_everywhere(PluginError, lambda made=(again, optimizer): distribute(model, *made))
            assert "distributed already" in messages[0]


def check_the_next_optimizer_begins_with_what_all_ranks_share() -> None:
    """Inside the block, after it, and after the program has dropped the one before."""
    for when in ("inside", "after", "dropped"):
        for compression in (OPTIONS, OkTopk(density=0.1), hvd.Compression.none):
            model, optimizer = trained(4)
            shared = flat(shared_of(model, optimizer))
            if when == "dropped":
                del optimizer
                gc.collect()
            with shared_parameters(optimizer) if when == "inside" else nullcontext():
                optimizer = distributed(model, compression)
            assert np.array_equal(flat(dict(model.named_parameters())), shared)
            train(model, optimizer, range(4, 8))
            assert_shared_is_equal(model, optimizer)


def check_a_model_that_was_resumed_keeps_its_optimizer_too() -> None:
    model, optimizer = trained(4)
    with shared_parameters(optimizer):
        states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    model, optimizer = trained(0)
    with shared_parameters(optimizer):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    train(model, optimizer, range(4, 8))
    del optimizer
    gc.collect()
    optimizer = distributed(model)
    assert_equal_everywhere(model.parameters())
    train(model, optimizer, range(8, 10))
    assert_shared_is_equal(model, optimizer)


def check_a_model_whose_optimizer_is_dropped_is_shared_copied_and_saved() -> None:
    model, optimizer = trained(4)
    shared = flat(shared_of(model, optimizer))
    del optimizer
    gc.collect()
    with shared_parameters(model):
        assert np.array_equal(flat(dict(model.named_parameters())), shared)
        file = io.BytesIO()
        torch.save(dict(model.named_parameters()), file)
        file.seek(0)
        loaded = torch.load(file)
        for copied in (loaded, dict(copy.deepcopy(model).named_parameters())):
            assert np.array_equal(flat(copied), shared)
            assert runs_over(copied.values()) == []


def check_a_layer_that_is_trained_on_frozen_ones_is_told() -> None:
    """Check that it is, but inside the block, where the frozen ones hold what all ranks share."""
    needs_ranks(hvd)
    gc.collect()
    model, optimizer = trained(4)
    model[0].requires_grad_(False)
    for inside in (True, False):
        with shared_parameters(model) if inside else nullcontext(), logged() as messages:
            distributed(torch.nn.Linear(2, 2), OkTopk(density=0.1))
        assert len(messages) == (not inside and hvd.rank() == 0), messages
    assert all("'0.bias' is frozen" in message for message in messages), messages
    optimizer.zero_grad()


def check_two_optimizers_of_the_same_parameters_take_turns() -> None:
    model = model_of()
    optimizers = [distributed(model), distributed(model, StepAhead(OkTopk(density=0.2)), torch.optim.Adam)]
    for step in range(0, 12, 2):
        before = flat(shared_of(model, optimizers[0]))
        turn: Any = optimizers[step // 2 % 2]
        train(model, turn, range(step, step + 2))
        with shared_parameters(model):
            assert_equal_everywhere(model.parameters())
            assert not np.array_equal(before, flat(dict(model.named_parameters())))


def check_states_of_optimizers_that_take_turns_are_loaded_together() -> None:
    """Load them in one block, into new ones and those that have gone on, whichever has the turn: the same bits."""
    model, optimizers = taking_turns()
    first, second = optimizers
    train(model, first, range(4))
    train(model, second, range(4, 8))
    with shared_parameters(model):
        saved = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
    later = [(second, range(8, 10)), (first, range(10, 13)), (second, range(13, 15))]
    for each, steps in later:
        train(model, each, steps)
    expected = flat(shared_of(model, model))
    for case in ("new", *optimizers):
        if case == "new":
            model, optimizers = taking_turns()
        else:
            train(model, case, range(3))
        with shared_parameters(model):
            load(model, optimizers, saved)
        assert_equal_everywhere(shared_of(model, model).values())
        for number, steps in ((1, range(8, 10)), (0, range(10, 13)), (1, range(13, 15))):
            train(model, optimizers[number], steps)
        assert np.array_equal(flat(shared_of(model, model)), expected)


def check_a_state_that_waits_stays_while_another_optimizer_steps() -> None:
    """Load outside of the block, as elastic jobs do that go back; the other's turn comes first."""
    for is_new in (True, False):
        model, optimizers = taking_turns()
        for each in optimizers:
            train(model, each, range(4))
        with shared_parameters(model):
            saved = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
        if is_new:
            model, optimizers = taking_turns()
        load(model, optimizers, saved)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for each, state in zip(optimizers, saved[1], strict=True):
                train(model, each, range(2))
                assert step_report(each).step == record_in(state)["algorithm"]["step"] + 1
        assert_equal_everywhere(shared_of(model, model).values())


def taking_turns() -> tuple[torch.nn.Module, list[Any]]:
    model = model_of()
    return model, [distributed(model), distributed(model, StepAhead(OkTopk(density=0.2)))]


def load(model: torch.nn.Module, optimizers: list[Any], saved: tuple[Any, list[Any]]) -> None:
    model.load_state_dict(saved[0])
    for each, state in zip(optimizers, copy.deepcopy(saved[1]), strict=True):
        each.load_state_dict(state)


def record_in(state: dict[str, Any]) -> Any:
    return state["horovod_oktopk"][0]


def check_dense_has_neither_report_nor_residual() -> None:
    """One argument switches to dense training: what else a program calls goes on."""
    params = parameters()
    optimizer = distribute(params, Dense())
    model = torch.nn.ParameterList(params.values())
    take_steps(optimizer, params, 0)
    assert step_report(optimizer) is step_report(model) is None
    set_density(optimizer, 0.5)
    synchronize_replicas(optimizer)
    with shared_parameters(optimizer):
        assert gather_state_dict(optimizer).keys() == {"state", "param_groups"}
    state, saved = hvd.elastic.TorchState(model=model, optimizer=optimizer), flat(params)
    take_steps(optimizer, params, 1)
    assert not np.array_equal(flat(params), saved)
    state.restore()
    state.sync()
    assert np.array_equal(flat(params), saved)
    other = distribute(params, hvd.Compression.none)
    assert "compression=OkTopk" in raised_everywhere(PluginError, lambda: gather_state_dict(other))[0]
