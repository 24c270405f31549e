"""Checkpoints and elastic state: the residual and the counters travel with the optimizer."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from horovod_oktopk import OptionError
from tests.scenarios.common import assert_disagreement, is_last, needs_ranks, shared_folder
from tests.scenarios.state import OPTIONS
from tests.support.full_disk import room_for
from tests.torch.library import OkTopk, StepAhead, gather_state_dict, hvd, step_report
from tests.torch.scenarios.common import (
    Params,
    descend,
    distribute,
    everywhere,
    flat,
    made,
    parameters,
    raised_everywhere,
    record_of,
    take_steps,
)


def trained(steps: int, options: OkTopk | StepAhead = OPTIONS) -> tuple[Params, Any]:
    params, optimizer = made(options)
    take_steps(optimizer, params, *range(steps))
    return params, optimizer


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_goes_on_as_if_nothing_had_happened(optimizer: Any, params: Params) -> None:
    """Assert that training goes on, after six steps."""
    take_steps(optimizer, params, *range(6, 12))
    assert step_report(optimizer).step == 12
    assert np.array_equal(flat(params), flat(trained(12)[0]))


def check_a_resumed_run_gives_the_same_bits() -> None:
    """From each rank's own state; what was loaded is saved again before the first step."""
    params, optimizer = trained(6)
    state = optimizer.state_dict()
    take_steps(optimizer, params, 0)  # what happens after the checkpoint must leave no trace in it
    resumed, _ = trained(6)
    fresh = distribute(resumed, OPTIONS)
    assert fresh.state_dict()["horovod_oktopk"] == []
    fresh.load_state_dict(through_a_file(state))
    assert torch.equal(record_of(fresh)["residual"], state["horovod_oktopk"][0]["residual"])
    assert record_of(fresh)["algorithm"]["step"] == 6
    assert_goes_on_as_if_nothing_had_happened(fresh, resumed)


def check_a_rank_that_gathers_its_state_while_others_go_on_is_told() -> None:
    needs_ranks(hvd)
    for options in (OPTIONS, StepAhead(OPTIONS, overlap=False)):
        params, optimizer = trained(3, options)
        action = partial(gather_state_dict, optimizer) if is_last(hvd) else partial(take_steps, optimizer, params, 3)
        assert_disagreement(hvd, action, "gather the state (gather_state_dict)")


def check_a_checkpoint_of_rank_0_alone_is_not_multiplied() -> None:
    _, optimizer = trained(3)
    state = hvd.broadcast_object(optimizer.state_dict(), root_rank=0)
    state["horovod_oktopk"][0]["process"] = "another"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state)
    total = sum(everywhere(record_of(optimizer)["residual"].numpy()))
    assert np.array_equal(total, state["horovod_oktopk"][0]["residual"].numpy())
    assert any("gather_state_dict" in str(w.message) for w in caught) == (hvd.rank() > 0)


def warns_of_a_loss(load: Callable[..., object], *arguments: Any) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(*arguments)
    return any("no residual of this package" in str(w.message) for w in caught)


def check_a_state_without_residuals_warns_if_there_is_one_to_lose() -> None:
    for options in (OPTIONS, StepAhead(OPTIONS)):
        model = torch.nn.Linear(9, 9)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer, fresh = (distribute(model, options) for _ in range(2))
        descend(optimizer, model(torch.eye(9)).square().sum())
        plain = torch.optim.SGD(model.parameters(), lr=1.0).state_dict()
        assert warns_of_a_loss(set_optimizer_state_dict, model, optimizer, get_optimizer_state_dict(model, optimizer))
        assert warns_of_a_loss(optimizer.load_state_dict, plain)
        assert not warns_of_a_loss(optimizer.load_state_dict, optimizer.state_dict())
        assert not warns_of_a_loss(fresh.load_state_dict, plain), "a fresh optimizer has no residual to lose"


def check_a_state_that_pytorch_refuses_changes_nothing() -> None:
    """Programs try to load an older optimizer's, and go on without."""
    for options in (OPTIONS, StepAhead(OPTIONS)):
        params, optimizer = trained(4, options)
        _, other = made(options, shapes={"another": (3,)})
        fresh_params, fresh = made(options)
        for each in (optimizer, fresh):
            before = each.state_dict()["horovod_oktopk"]
            with pytest.raises(ValueError, match="doesn't match the size of"):
                each.load_state_dict(other.state_dict() | {"horovod_oktopk": []})
            after = each.state_dict()["horovod_oktopk"]
            assert all(torch.equal(a["residual"], b["residual"]) for a, b in zip(after, before, strict=True))
        saved = copy.deepcopy(optimizer.state_dict())
        saved["horovod_oktopk"][0]["parameters"] = [["another", [3]]]
        saved["horovod_oktopk"][0]["residual"] = torch.zeros(3)
        saved["param_groups"][0]["lr"] = 99.0
        with pytest.raises(OptionError, match="of other parameters"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 1.0, "and the other way round"
        take_steps(optimizer, params, 4)
        assert record_of(optimizer)["algorithm"]["step"] == 5
        take_steps(fresh, fresh_params, 0)


class OwnLoading(torch.optim.SGD):
    """An optimizer that loads states by itself, without PyTorch's hooks, as those of 8 bits do."""

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        assert not move_to_device
        groups = [{**new, "params": old["params"]} for old, new in
                  zip(self.param_groups, state_dict["param_groups"], strict=True)]
        self.__setstate__({"state": state_dict["state"], "param_groups": groups})


def check_an_optimizer_that_loads_states_by_itself_takes_the_residual() -> None:
    _, optimizer = trained(3)
    params = parameters()
    fresh = distribute(params, OPTIONS, OwnLoading(params.values(), lr=1.0))
    fresh.load_state_dict(optimizer.state_dict(), move_to_device=False)
    assert torch.equal(record_of(fresh)["residual"], record_of(optimizer)["residual"])


def check_what_was_loaded_is_gathered_before_the_first_step() -> None:
    _, optimizer = trained(3)
    expected = everywhere(record_of(optimizer)["residual"].numpy())
    for state in (hvd.broadcast_object(gather_state_dict(optimizer), root_rank=0), optimizer.state_dict()):
        fresh = distribute(parameters(), OPTIONS)
        fresh.load_state_dict(state)
        records = gather_state_dict(fresh)["horovod_oktopk"]
        shown = expected if hvd.rank() == 0 else [expected[hvd.rank()]]
        assert np.array_equal([record["residual"].numpy() for record in records], shown)


def check_elastic_state_restores_residual_and_counter() -> None:
    for optimizer_too in (True, False):
        assert_restored_by_an_elastic_state(optimizer_too)


def assert_restored_by_an_elastic_state(optimizer_too: bool) -> None:
    params = torch.nn.ParameterDict({name.replace(".", "_"): p for name, p in parameters().items()})
    named = {name: params[name.replace(".", "_")] for name in parameters()}
    optimizer = distribute(named, OPTIONS)
    state = hvd.elastic.TorchState(model=params, optimizer=optimizer if optimizer_too else None, epoch=0)
    state.sync()
    take_steps(optimizer, named, *range(3))
    state.save()
    take_steps(optimizer, named, *range(3, 7))
    expected, residual = flat(named), record_of(optimizer)["residual"]
    state.restore()
    assert not np.array_equal(flat(named), expected)
    take_steps(optimizer, named, *range(3, 7))
    assert step_report(optimizer).step == 7
    assert np.array_equal(flat(named), expected)
    assert torch.equal(record_of(optimizer)["residual"], residual)


class OnADevice(torch.Tensor):
    """Stands for a tensor on a GPU, which torch.load(map_location="cuda") gives: NumPy cannot read it there."""

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def check_a_checkpoint_that_was_loaded_to_a_device() -> None:
    _, optimizer = trained(3)
    state = optimizer.state_dict()
    residual = state["horovod_oktopk"][0]["residual"].clone()
    for loading in (optimizer, distribute(parameters(), OPTIONS)):  # in the middle, and before the first step
        state["horovod_oktopk"][0]["residual"] = residual.clone().as_subclass(OnADevice)
        loading.load_state_dict(state)
        assert np.array_equal(record_of(loading)["residual"].numpy(), residual.numpy())


def check_training_goes_on_where_rank_0_cannot_write_a_checkpoint() -> None:
    params, optimizer = trained(6)
    with shared_folder(hvd) as folder:
        for limit in (0, 100, 1000):
            state = gather_state_dict(optimizer)
            if hvd.rank() == 0:
                failed = False
                with room_for(limit):
                    try:
                        torch.save(state, folder / "state")
                    except (OSError, RuntimeError):  # PyTorch's own writer
                        failed = True
                assert failed, limit
        everywhere("done")
    assert_goes_on_as_if_nothing_had_happened(optimizer, params)


def check_a_state_of_another_model_is_refused_before_the_first_step_too() -> None:
    states = []
    for size in (9, 8):
        model = torch.nn.Linear(size, size)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = distribute(model, OPTIONS, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        if states:
            messages = raised_everywhere(OptionError, partial(optimizer.load_state_dict, *states))
            assert "Load one of this model" in messages[0]
            assert not optimizer.state_dict()["state"]
        descend(optimizer, model(torch.eye(size)).square().sum())
        states.append(copy.deepcopy(optimizer.state_dict()))


def check_a_damaged_record_is_refused_and_nothing_is_taken() -> None:
    params, optimizer = trained(6)
    state = hvd.broadcast_object(through_a_file(gather_state_dict(optimizer)), root_rank=0)
    last = state["horovod_oktopk"][-1]
    residual = last["residual"]
    damaged = [{name: value for name, value in last.items() if name != "algorithm"}, [],
               {**last, "algorithm": {**last["algorithm"], "boundaries": [5]}},
               {**last, "residual": residual[:-1]}, {**last, "residual": residual.to(torch.bfloat16)},
               {**last, "residual": residual.numpy()}, {**last, "residual": torch.full_like(residual, torch.nan)}]
    for record in damaged:
        state["horovod_oktopk"][-1] = record
        messages = raised_everywhere(OptionError, lambda: optimizer.load_state_dict(state))
        assert len(set(messages)) == 1, messages
        assert "damaged" in messages[0]
    assert_goes_on_as_if_nothing_had_happened(optimizer, params)
