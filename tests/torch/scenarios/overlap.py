"""Groups are reduced while the backward pass runs, whatever else PyTorch's users do."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk import AgreementError
from horovod_oktopk.torch import OkTopk, set_density, step_report
from horovod_oktopk.torch.registry import reducer_of
from tests.scenarios.common import needs_ranks
from tests.torch.scenarios import features, mixed_precision
from tests.torch.scenarios.common import (
    assert_equal_everywhere,
    backward,
    distribute,
    flat,
    gradients,
    parameters,
    raised_everywhere,
)

ALONE = OkTopk(density=1.0, bucket_bytes=1)
"""Every gradient is a bucket of its own."""


class HoldBackward(torch.autograd.Function):
    """The identity; its backward pass goes on when the condition holds, or after 20 s."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, condition: Any) -> torch.Tensor:
        ctx.condition = condition
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        deadline = time.monotonic() + 20
        while not ctx.condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        return gradient, None


def check_a_bucket_is_reduced_while_the_backward_pass_still_runs() -> None:
    needs_ranks(hvd)  # alone there are no hooks on the backward pass, as in stock Horovod
    first, second = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
    optimizer = distribute({"first": first, "second": second}, ALONE)
    reduced = []
    """Buckets that were reduced in each step when the backward pass went on."""

    def is_one_reduced() -> bool:
        flat = reducer_of(optimizer).flat
        reduced[-1] = 0 if flat is None else len(flat._results)
        return flat is None or reduced[-1] == 1

    for _ in range(3):
        reduced.append(-1)
        optimizer.zero_grad()
        (HoldBackward.apply(2 * first, is_one_reduced) * second).sum().backward()
        optimizer.step()
    assert reduced == [0, 1, 1], "of the two buckets, one is to be reduced before the backward pass has ended"


def check_registration_order_must_agree() -> None:
    needs_ranks(hvd)
    params = parameters()
    if hvd.rank() == hvd.size() - 1:
        params = dict(reversed(params.items()))

    def step(compression: OkTopk) -> None:
        optimizer = distribute(params, compression)
        backward(params, gradients(0, hvd.rank()))
        optimizer.step()

    step(OkTopk(density=0.1))  # in one bucket it does not matter
    assert "bucket 1 of 4: d" in raised_everywhere(AgreementError, lambda: step(ALONE))[0]


def check_a_step_that_failed_leaves_no_bucket_behind() -> None:
    needs_ranks(hvd)
    params = parameters()
    optimizer = distribute(params, ALONE, op=hvd.Sum)
    features.plain_step(optimizer, params, 0)
    before = flat(params)
    reducer_of(optimizer).set_density(0.5 if hvd.rank() == 0 else 1.0)
    raised_everywhere(AgreementError, lambda: features.plain_step(optimizer, params, 1))
    reducer_of(optimizer).set_density(1.0)
    optimizer.load_state_dict(optimizer.state_dict())  # as after an error in an elastic job
    assert np.array_equal(flat(params), before)
    features.plain_step(optimizer, params, 2)
    expected = before - sum(flat(gradients(2, rank)) for rank in range(hvd.size()))
    assert np.array_equal(flat(params), expected)


def check_a_backward_pass_without_a_step_is_dropped() -> None:
    """Also where some ranks have begun to reduce, and another lacks a gradient of the first bucket."""
    for lacking in ([], ["d"]):
        params = parameters()
        optimizer = distribute(params, ALONE, op=hvd.Sum)
        features.plain_step(optimizer, params, 0)
        state, before = optimizer.state_dict(), flat(params)
        optimizer.zero_grad()
        grads = gradients(1, hvd.rank())
        backward(params, {name: grads[name] for name in grads if hvd.rank() > 0 or name not in lacking})
        optimizer.load_state_dict(state)
        features.plain_step(optimizer, params, 2)
        assert np.array_equal(flat(params), before - sum(flat(gradients(2, rank)) for rank in range(hvd.size())))
        assert step_report(optimizer).step == 2


def check_a_gradient_missing_on_one_rank_ends_its_bucket_late() -> None:
    params = parameters()
    optimizer = distribute(params, ALONE, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        grads = gradients(step, hvd.rank())
        if hvd.rank() == 0:
            del grads["d"]  # of the first bucket
        backward(params, grads)
        optimizer.step()
    others = sum(gradients(step, rank)["d"] for step in range(3) for rank in range(1, hvd.size()))
    assert torch.equal(params["d"].detach(), -others * torch.ones(1))
    assert_equal_everywhere(params.values())


def check_a_loss_scale_serves_all_buckets() -> None:
    results = []
    for scaler in (None, mixed_precision.scaler_of(4.0, interval=1)):
        params = parameters()
        optimizer = distribute(params, OkTopk(density=0.1, bucket_bytes=60), op=hvd.Sum)
        for step in range(6):
            if scaler is None:
                features.plain_step(optimizer, params, step)
            else:
                mixed_precision.scaled_step(optimizer, scaler, params, gradients(step, hvd.rank()))
        results.append(flat(params))
    assert np.array_equal(*results)


def check_accumulated_passes_and_sparse_gradients_in_buckets() -> None:
    embedding = torch.nn.Embedding(20, 3, sparse=True)
    other = torch.nn.ParameterList([torch.zeros(2), torch.zeros(3)])
    torch.nn.init.zeros_(embedding.weight)
    model = torch.nn.ModuleDict({"embedding": embedding, "other": other})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), compression=ALONE, op=hvd.Sum,
                                         named_parameters=model.named_parameters(), backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            (embedding(torch.tensor([step])).sum() + sum(p.sum() for p in other)).backward()
        optimizer.step()
    assert embedding.weight.detach()[:4, 0].tolist() == [-2.0 * hvd.size()] * 3 + [0.0]
    assert [p.detach().tolist() for p in other] == [[-6.0 * hvd.size()] * n for n in (2, 3)]
    assert step_report(optimizer).step == 3


def check_auto_agrees_on_the_same_buckets_everywhere_and_conserves() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.1, bucket_bytes="auto"), op=hvd.Sum)
    tried = set()
    for step in range(30):
        features.plain_step(optimizer, params, step)
        buckets = [bucket.members for bucket in reducer_of(optimizer).flat.buckets]
        assert len(set(map(str, hvd.allgather_object(buckets)))) == 1, f"step {step}"
        tried.add(len(buckets))
    assert reducer_of(optimizer).flat.trial.over
    assert {1, 2} <= tried
    assert_equal_everywhere(params.values())
    held = sum(hvd.allgather_object(reducer_of(optimizer).flat.read_residual()))
    computed = sum(flat(gradients(step, rank)) for step in range(30) for rank in range(hvd.size()))
    assert np.array_equal(held - flat(params), computed)


def check_several_optimizers_overlap_with_one_backward_pass() -> None:
    """Whose gradients come first differs between the ranks, and one optimizer has one bucket."""
    for options in ((ALONE, ALONE), (ALONE, OkTopk(density=1.0))):
        several = [parameters() for _ in options]
        optimizers = [distribute(params, each, op=hvd.Sum) for params, each in zip(several, options, strict=True)]
        for step in range(4):
            losses = []
            for offset, params in enumerate(several):
                optimizers[offset].zero_grad()
                grads = gradients(10 * offset + step, hvd.rank())
                losses.append(sum((params[name] * grads[name]).sum() for name in grads))
            sum(reversed(losses) if hvd.rank() % 2 else losses).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
        for offset, params in enumerate(several):
            computed = [flat(gradients(10 * offset + step, rank)) for step in range(4) for rank in range(hvd.size())]
            assert np.array_equal(flat(params), -sum(computed))


def check_a_rank_that_made_more_optimizers_agrees_with_the_others() -> None:
    if hvd.rank() == 0:
        distribute(parameters(), ALONE)
    for _ in range(2):
        params = parameters()
        optimizer = distribute(params, ALONE, op=hvd.Sum)
        for step in range(2):
            features.plain_step(optimizer, params, step)
        assert_equal_everywhere(params.values())


def check_a_density_that_is_set_before_the_step_is_for_the_next() -> None:
    needs_ranks(hvd)  # alone the gradients are handed in by the step
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.1, bucket_bytes=60))
    for step, density in enumerate((0.1, 0.5, 0.2, 0.2)):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        if hvd.rank() == 0:
            time.sleep(0.05)  # the others' threads are under way
        set_density(optimizer, density)
        optimizer.step()
        in_force = (0.1, 0.1, 0.5, 0.2)[step]
        assert step_report(optimizer).k == sum(round(in_force * length) for length in (25, 46)), step


def check_one_rank_alone_loads_a_state_while_buckets_are_tried() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.5, bucket_bytes="auto"), op=hvd.Sum)
    for step in range(12):
        features.plain_step(optimizer, params, step)
        if step == 9 and hvd.rank() == 0:
            optimizer.load_state_dict(optimizer.state_dict())
    assert len(reducer_of(optimizer).flat.buckets) == 2
