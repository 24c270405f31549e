"""A model that is changed in mid-training: what joins is reduced; what was converted is refused, on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from horovod_oktopk import AgreementError, PluginError
from tests.scenarios.common import is_last, needs_ranks
from tests.torch.library import OkTopk, StepAhead, hvd, shared_parameters, step_report
from tests.torch.scenarios.common import assert_equal_everywhere, distribute, flat, raised_everywhere, record_of
from tests.torch.scenarios.step_ahead import assert_shared_is_equal, made, shared_of, train, trained

OWN_STEPS = (StepAhead(OkTopk(density=0.1)), StepAhead(OkTopk(density=0.1), overlap=False, local_steps=2))
KINDS = (*OWN_STEPS, OkTopk(density=0.1))


def try_step(model: torch.nn.Module, optimizer: Any) -> Any:
    return lambda: train(model, optimizer, range(4, 8))


def refuse_to_read(model: torch.nn.Module, optimizer: Any) -> None:
    """Assert that a converted model cannot be read; once it is converted back, training goes on."""
    raised_everywhere(PluginError, lambda: shared_of(model, optimizer))
    raised_everywhere(PluginError, optimizer.state_dict)
    model.float()
    train(model, optimizer, range(8, 12))
    assert_shared_is_equal(model, optimizer)


def check_a_model_that_is_converted_in_mid_training_is_refused() -> None:
    for compression in KINDS:
        for convert in (torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double):
            model, optimizer = trained(4, compression)
            convert(model)
            for message in raised_everywhere(PluginError, try_step(model, optimizer)):
                assert "'0.bias' is" in message, message
                assert "was float32" in message, message
            if compression in OWN_STEPS:
                refuse_to_read(model, optimizer)


def check_one_rank_alone_that_converts_its_model_is_told_everywhere() -> None:
    needs_ranks(hvd)
    for compression in KINDS:
        model, optimizer = trained(4, compression)
        if is_last(hvd):
            model.half()
        for message in raised_everywhere(AgreementError, try_step(model, optimizer)):
            assert f"rank {hvd.size() - 1} has ''0.bias' is float16 on cpu" in message, message


def check_a_model_that_is_converted_inside_shared_parameters_is_refused_when_it_ends() -> None:
    model, optimizer = trained(4)
    shared = flat(shared_of(model, optimizer))

    def convert() -> None:
        with shared_parameters(optimizer):
            model.half()

    assert "copy.deepcopy" in raised_everywhere(PluginError, convert)[0]
    raised_everywhere(PluginError, try_step(model, optimizer))
    half = flat(dict(model.named_parameters()))
    assert half.dtype == np.float16
    assert np.allclose(half, shared, atol=1e-3), "what was shared is still there"


def check_another_memory_format_or_shape_is_refused() -> None:
    def transposed(p: torch.Tensor) -> torch.Tensor:
        return p.t().contiguous().t()

    for change in (transposed, lambda p: p[:5].clone()):
        model, optimizer = trained(4)
        model[0].weight.data = change(model[0].weight.data)
        assert "'0.weight' is" in raised_everywhere(PluginError, optimizer.step)[0]
    model, optimizer = trained(2, OkTopk(density=0.1))
    model[0].weight.data = transposed(model[0].weight.data)  # gradients are read in the order of indices
    train(model, optimizer, range(2, 4))


def check_a_layer_that_is_exchanged_joins() -> None:
    """Check it for groups that hold as many parameters as before, of which some are others."""
    for compression in KINDS:
        model, optimizer = trained(4, compression)
        with shared_parameters(optimizer):
            torch.manual_seed(1)
            last = len(model) - 1
            model[last] = torch.nn.Linear(model[last].in_features, model[last].out_features)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        start = model[last].weight.detach().clone()
        train(model, optimizer, range(4, 12))
        with shared_parameters(optimizer):
            assert_equal_everywhere(model.parameters())
            assert not torch.equal(model[last].weight, start)


def check_a_residual_stays_with_its_parameter() -> None:
    """Check it though names of late parameters are numbers, which change as parameters come and go."""
    for compression in (OkTopk(density=0.05), StepAhead(OkTopk(density=0.05, value_dtype=None), ahead=1, gain=None)):
        body, *heads = (torch.nn.Parameter(torch.zeros(size)) for size in (40, 6, 6, 6, 8))
        optimizer = distribute({"body": body, "head": heads[0]}, compression)
        place, held = {head: number for number, head in enumerate(heads)}, dict[torch.Tensor, float]()
        for present in ([heads[0]], [heads[1]], [heads[2], heads[1]], [heads[3], heads[2]]):
            with shared_parameters(optimizer):
                optimizer.param_groups[0]["params"] = [body, *present]
            body.grad = torch.arange(40.0) * 100 + 1000  # of which alone some are sent
            held = {head: held.get(head, 0.0) + 1 + place[head] for head in present}
            for head in present:
                head.grad = torch.full_like(head, 1.0 + place[head])
            optimizer.step()
            with shared_parameters(optimizer):
                record = record_of(optimizer)
            parts = torch.split(record["residual"], [shape[0] for _, shape in record["parameters"]])
            found = sorted((len(part), part[0].item()) for part in parts[1:])
            assert found == sorted((len(head), held[head]) for head in present), (found, held)


def check_a_parameter_that_moves_to_another_optimizer_is_the_one_that_ranks_share() -> None:
    first, second = (torch.nn.Linear(6, 4) for _ in range(2))
    model = torch.nn.Sequential(first, second)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    one, other = (distribute(layer, StepAhead(OkTopk(density=0.1)), lr=0.1) for layer in (first, second))

    def step(*optimizers: Any) -> None:
        torch.manual_seed(hvd.rank())
        for layer in (first, second):
            layer.zero_grad()
            layer(torch.randn(3, 6)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(4):
        step(one, other)
    moved, other.param_groups[0]["params"] = other.param_groups[0]["params"], []
    one.param_groups[0]["params"] += moved
    for _ in range(4):
        step(one)
    with shared_parameters(model):
        assert_equal_everywhere(model.parameters())


def check_what_thaws_joins_and_what_is_frozen_is_not_counted() -> None:
    for compression in KINDS:
        model, optimizer = made(compression)
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
        train(model, optimizer, range(4))
        with shared_parameters(optimizer):
            pass
        report = step_report(optimizer)
        assert report.n == sum(p.numel() for p in model.parameters() if p.requires_grad), report.n
        assert torch.equal(model[0].weight, before)
        model[0].requires_grad_(True)
        train(model, optimizer, range(4, 12))
        with shared_parameters(optimizer):
            assert step_report(optimizer).n == sum(p.numel() for p in model.parameters())
            assert_equal_everywhere(model.parameters())
            assert not torch.equal(model[0].weight, before)


def check_a_model_that_was_frozen_whole_thaws() -> None:
    for compression in KINDS:
        model, optimizer = made(compression)
        model.requires_grad_(False)
        optimizer.step()
        model.requires_grad_(True)
        train(model, optimizer, range(4))
        with shared_parameters(optimizer):
            assert step_report(optimizer).n == sum(p.numel() for p in model.parameters())
            assert_equal_everywhere(model.parameters())


def check_a_layer_that_cannot_join_is_refused_at_each_step() -> None:
    model, optimizer = made(StepAhead(OkTopk(density=0.3)))
    train(model, optimizer, range(2))
    with shared_parameters(optimizer):
        optimizer.add_param_group({"params": torch.nn.Linear(2, 2).half().parameters()})
    for _ in range(2):
        for message in raised_everywhere(PluginError, try_step(model, optimizer)):
            assert "StepAhead needs float32 or float64 parameters" in message, message


def check_a_layer_that_joins_on_one_rank_alone_is_told_everywhere() -> None:
    needs_ranks(hvd)
    for compression in KINDS:
        model, optimizer = made(compression)
        model[0].requires_grad_(False)
        train(model, optimizer, range(2))
        if is_last(hvd):
            model[0].requires_grad_(True)
        for message in raised_everywhere(AgreementError, try_step(model, optimizer)):
            assert "go on with other parameters than before: 0.bias, 0.weight." in message, message
