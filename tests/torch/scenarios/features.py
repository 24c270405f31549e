"""What users of hvd.DistributedOptimizer know goes on working: compared with stock Horovod, at density 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk import AgreementError, PluginError
from horovod_oktopk.torch import OkTopk, Partial, StepAhead, set_density, step_report, synchronize_replicas
from tests.scenarios.common import needs, needs_ranks
from tests.torch.scenarios.common import (
    DENSE,
    assert_equal_everywhere,
    backward,
    distribute,
    flat,
    gradients,
    parameters,
    raised_everywhere,
)

Params = dict[str, torch.nn.Parameter]
Step = Callable[[Any, Params, int], None]


def plain_step(optimizer: Any, params: Params, step: int) -> None:
    optimizer.zero_grad()
    backward(params, gradients(step, hvd.rank()))
    optimizer.step()


def train(compression: Any, take_step: Step = plain_step, dtype: torch.dtype = torch.float32,
          arguments: Callable[[Params], dict[str, Any]] = lambda _: {}) -> np.ndarray:
    """The parameters after four steps."""
    params = parameters(dtype)
    optimizer = distribute(params, compression, **arguments(params))
    for step in range(4):
        take_step(optimizer, params, step)
    assert_equal_everywhere(params.values())
    return flat(params)


def assert_like_stock(**how: Any) -> None:
    """Rounding apart: stock multiplies by 1/P where we divide by P."""
    stock, ours = train(hvd.Compression.none, **how), train(DENSE, **how)
    assert np.abs(stock).max() > 1
    np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-4)


def check_synchronize_and_clip() -> None:
    def take_step(optimizer: Any, params: Params, step: int) -> None:
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(params.values(), 10.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    assert_like_stock(take_step=take_step)


def check_the_gradients_of_a_closure_are_reduced() -> None:
    def take_step(optimizer: Any, params: Params, step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return backward(params, gradients(step, hvd.rank()))

        assert optimizer.step(closure).requires_grad

    ours = train(DENSE, take_step)
    np.testing.assert_allclose(ours, train(DENSE), rtol=0, atol=0)
    assert np.abs(ours).max() > 1


def check_lbfgs_is_refused() -> None:
    params = parameters()
    plain = torch.optim.LBFGS(params.values())
    for compression in (DENSE, StepAhead(), Partial()):
        (message,) = set(raised_everywhere(PluginError, lambda compression=compression: hvd.DistributedOptimizer(
            plain, named_parameters=params.items(), compression=compression)))
        assert "LBFGS" in message
        assert "another optimizer" in message
    hvd.DistributedOptimizer(plain, named_parameters=params.items())  # stock takes it


def check_closure() -> None:
    params = parameters()
    optimizer = distribute(params, DENSE)
    backward(params, gradients(0, hvd.rank()))
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        loss = optimizer.step(lambda: torch.tensor(5.0))
    assert loss == 5.0
    assert_equal_everywhere(params.values())


def check_unnamed_parameters() -> None:
    params = parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), compression=DENSE, op=hvd.Sum)
    plain_step(optimizer, params, 0)
    total = sum(flat(gradients(0, rank)) for rank in range(hvd.size()))
    assert np.array_equal(flat(params), -total)


def check_two_backward_passes_alone() -> None:
    """Stock registers no hooks on one rank, so that any number of passes may come before a step."""
    needs(hvd.size() == 1, "one rank alone")

    def take_step(optimizer: Any, params: Params, step: int) -> None:
        optimizer.zero_grad()
        backward(params, gradients(step, 0))
        optimizer.zero_grad()
        for each in range(2):
            backward(params, gradients(10 * step + each, 0))
        optimizer.step()

    assert_like_stock(take_step=take_step)
    assert_like_stock(take_step=take_step, arguments=lambda _: {"groups": 2})


def check_training_goes_on_after_an_error() -> None:
    needs_ranks(hvd)
    for arguments in ({}, {"groups": 2}, {"backward_passes_per_step": 2}):
        params, expected = parameters(), parameters()
        optimizer = distribute(params, DENSE, op=hvd.Sum, **arguments)
        reference = distribute(expected, DENSE, op=hvd.Sum)
        set_density(optimizer, 0.5 if hvd.rank() == 0 else 1.0)
        raised_everywhere(AgreementError, lambda step=plain_step, made=(optimizer, params): step(*made, 0))
        set_density(optimizer, 1.0)
        for step in range(1, 3):
            plain_step(optimizer, params, step)
            plain_step(reference, expected, step)
        assert np.array_equal(flat(params), flat(expected))


def check_a_gradient_missing_on_one_rank_or_on_all() -> None:
    params = parameters()
    optimizer = distribute(params, DENSE, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        grads = gradients(step, hvd.rank())
        del grads["c.scale"]
        if hvd.rank() == 0:
            del grads["a.bias"]
        backward(params, grads)
        optimizer.step()
    assert not params["c.scale"].detach().any()
    others = sum(gradients(step, rank)["a.bias"] for step in range(3) for rank in range(1, hvd.size()))
    assert torch.equal(params["a.bias"].detach(), -others * torch.ones(11))
    assert_equal_everywhere(params.values())


def check_frozen_parameter() -> None:
    params = parameters()
    params["b.weight"].requires_grad_(False)
    optimizer = distribute(params, DENSE, op=hvd.Sum)
    grads = gradients(0, hvd.rank())
    del grads["b.weight"]
    backward(params, grads)
    optimizer.step()
    assert not params["b.weight"].any()
    assert torch.equal(params["d"].detach(), -sum(gradients(0, rank)["d"] for rank in range(hvd.size())))


def check_what_was_computed_before_a_parameter_froze_is_still_applied() -> None:
    half = [Partial(OkTopk(density=0.2), policy="solo")] if hvd.mpi_enabled() else []
    for compression in (OkTopk(density=0.2), *half):
        params = parameters()
        optimizer = distribute(params, compression, op=hvd.Sum)
        for step in range(2):
            plain_step(optimizer, params, step)
        synchronize_replicas(optimizer)
        if hvd.rank() == 0:
            params["b.weight"].requires_grad_(False)
        empty_the_residuals(optimizer, params)
        assert_equal_everywhere(params.values())
        assert np.array_equal(-flat(params), sum(flat(gradients(step, rank)) for rank in range(hvd.size())
                                                 for step in range(2)))


def empty_the_residuals(optimizer: Any, params: Params) -> None:
    """By steps without gradients."""
    for _ in range(40):
        optimizer.zero_grad()
        backward(params, {name: torch.zeros_like(p) for name, p in params.items() if p.requires_grad})
        optimizer.step()
    synchronize_replicas(optimizer)


def check_tied_parameters() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = torch.nn.Linear(6, 6, bias=False)
            self.decode = torch.nn.Linear(6, 6, bias=False)
            self.decode.weight = self.encode.weight

    def total(compression: Any) -> torch.Tensor:
        model = Tied()
        torch.nn.init.ones_(model.encode.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum,
                                             named_parameters=model.named_parameters(), compression=compression)
        model.decode(model.encode(torch.full((2, 6), float(hvd.rank() + 1)))).sum().backward()
        optimizer.step()
        return model.encode.weight.detach()

    assert torch.equal(total(DENSE), total(hvd.Compression.none))


def check_sparse_gradients() -> None:
    for as_dense in (False, True):
        results = []
        for compression in (hvd.Compression.none, DENSE):
            embedding = torch.nn.Embedding(20, 3, sparse=True)
            linear = torch.nn.Linear(3, 1)
            for p in (*embedding.parameters(), *linear.parameters()):
                torch.nn.init.ones_(p)
            model = torch.nn.ModuleDict({"embedding": embedding, "linear": linear})
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), op=hvd.Sum,
                                                 named_parameters=model.named_parameters(), compression=compression,
                                                 sparse_as_dense=as_dense)
            for step in range(3):
                optimizer.zero_grad()
                rows = torch.tensor([step, step + hvd.rank() + 1])
                linear(embedding(rows)).sum().backward()
                optimizer.step()
                assert embedding.weight.grad.is_sparse
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            assert_equal_everywhere(model.parameters())
        torch.testing.assert_close(results[1], results[0])


def check_nan_in_a_sparse_gradient_alone_undoes_the_step() -> None:
    """As a step is skipped whole, what the dense gradients would have sent must stay in the residual."""
    for options in (OkTopk(density=0.5),):
        params = {"table": torch.nn.Parameter(torch.ones(20, 3)), **parameters(shapes={"a": (4,), "b": (4,)})}
        optimizer = distribute(params, options)

        def step(factor: float, params: Any = params, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            rows = torch.nn.functional.embedding(torch.tensor([1, 2]), params["table"], sparse=True)
            weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
            (factor * rows.sum() + sum((params[name] * weights).sum() for name in "ab")).backward()
            optimizer.synchronize()
            return optimizer.state_dict()["horovod_oktopk"][0]["residual"].numpy()

        for _ in range(2):
            held = step(1.0)
        assert held.any()
        for poison in (float("inf"), float("nan")):
            assert np.array_equal(step(poison if hvd.rank() == hvd.size() - 1 else 1.0), held)
            assert all(params[name].grad.isnan().all() for name in "ab")
            assert not step_report(optimizer).finite
        step(1.0)
        assert step_report(optimizer).finite
        assert step_report(optimizer).step == 3


def check_a_sparse_gradient_missing_on_some_ranks() -> None:
    embedding, other = torch.nn.Embedding(20, 3, sparse=True), torch.nn.Parameter(torch.zeros(2))
    torch.nn.init.zeros_(embedding.weight)
    optimizer = distribute({"e": embedding.weight, "o": other}, DENSE, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        loss = other.sum()
        if step == 0 or hvd.rank() == 0:
            loss = loss + embedding(torch.tensor([step])).sum()
        loss.backward()
        optimizer.step()
    assert_equal_everywhere([embedding.weight, other])
    assert embedding.weight.detach()[:4, 0].tolist() == [-float(hvd.size()), -1.0, -1.0, 0.0]


def check_a_gradient_that_is_missing_at_first_and_sparse_later() -> None:
    """It has a place among the dense ones then."""
    embedding, other = torch.nn.Embedding(20, 3, sparse=True), torch.nn.Parameter(torch.zeros(2))
    torch.nn.init.zeros_(embedding.weight)
    optimizer = distribute({"e": embedding.weight, "o": other}, DENSE, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        (other.sum() + (embedding(torch.tensor([step])).sum() if step else 0)).backward()
        optimizer.step()
        assert not step or embedding.weight.grad.is_sparse
    assert embedding.weight.detach()[:4, 0].tolist() == [0.0, -float(hvd.size()), -float(hvd.size()), 0.0]


def check_a_gradient_that_becomes_dense_on_one_rank_is_told_everywhere() -> None:
    needs_ranks(hvd)
    embedding, other = torch.nn.Embedding(20, 3, sparse=True), torch.nn.Parameter(torch.zeros(2))
    optimizer = distribute({"e": embedding.weight, "o": other}, DENSE)

    def step(dense: bool) -> None:
        optimizer.zero_grad()
        (other.sum() + (embedding.weight if dense else embedding(torch.tensor([1]))).sum()).backward()
        optimizer.step()

    step(dense=False)
    raised_everywhere(AgreementError, lambda: step(dense=hvd.rank() == 0))
    raised_everywhere(PluginError, lambda: step(dense=True))


def check_non_contiguous_gradients() -> None:
    values = [torch.randint(-9, 9, (4, 3, 2, 2), generator=torch.Generator().manual_seed(rank)).float()
              for rank in range(hvd.size())]
    weight = torch.nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = distribute({"w": weight}, DENSE, op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * values[hvd.rank()].to(memory_format=torch.channels_last)).sum().backward()
        assert not weight.grad.is_contiguous()
        optimizer.step()
    assert torch.equal(weight.detach(), -2 * sum(values))


def check_the_reduced_gradient_has_the_layout_of_the_one_that_came() -> None:
    """Fused optimizers go through parameters and gradients as they lie in memory."""
    shapes = {"conv": (4, 3, 2, 2), "turned": (5, 3)}
    grads = [{name: torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()
              for name, shape in shapes.items()} for rank in range(hvd.size())]
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {"conv": torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
                   "turned": torch.zeros(3, 5).t()}
        params = {name: torch.nn.Parameter(tensor.to(dtype)) for name, tensor in tensors.items()}
        inner = torch.optim.SGD(params.values(), lr=1.0, fused=dtype is torch.float32)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=params.items(), op=hvd.Sum, compression=DENSE)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params, {name: g.to(dtype) for name, g in grads[hvd.rank()].items()})
            strides = {name: p.grad.stride() for name, p in params.items()}
            optimizer.step()
            assert {name: p.grad.stride() for name, p in params.items()} == strides
        for name, p in params.items():
            assert p.stride() == strides[name] != torch.empty(p.shape).stride()
            assert torch.equal(p.detach().float(), -2 * sum(each[name] for each in grads))


def check_broadcast_of_parameters_and_state() -> None:
    params = {name: torch.nn.Parameter(torch.full(p.shape, float(hvd.rank()))) for name, p in parameters().items()}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0 + hvd.rank(), momentum=0.5),
                                         named_parameters=params.items(), compression=DENSE)
    hvd.broadcast_parameters(params, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.zero_grad()
    backward(params, gradients(0, hvd.rank()))
    optimizer.step()
    assert_equal_everywhere(params.values())


def check_a_model_without_trainable_parameters() -> None:
    params = parameters()
    for p in params.values():
        p.requires_grad_(False)
    distribute(params, DENSE).step()


def check_a_backward_pass_without_a_step_is_dropped() -> None:
    """Also where a rank lacks a gradient."""
    for lacking in ([], ["d"]):
        params = parameters()
        optimizer = distribute(params, DENSE, op=hvd.Sum)
        plain_step(optimizer, params, 0)
        state, before = optimizer.state_dict(), flat(params)
        optimizer.zero_grad()
        grads = gradients(1, hvd.rank())
        backward(params, {name: grads[name] for name in grads if hvd.rank() > 0 or name not in lacking})
        optimizer.load_state_dict(state)
        plain_step(optimizer, params, 2)
        assert np.array_equal(flat(params), before - sum(flat(gradients(2, rank)) for rank in range(hvd.size())))
        assert step_report(optimizer).step == 2


def check_data_that_worker_processes_load() -> None:
    """They are forked while MPI and the watchdog's thread run."""
    params = parameters()
    optimizer = distribute(params, DENSE, op=hvd.Sum)
    plain_step(optimizer, params, 0)
    for step in torch.utils.data.DataLoader(range(1, 4), batch_size=None, num_workers=2,
                                            multiprocessing_context="fork"):
        plain_step(optimizer, params, step)
    assert np.array_equal(flat(params), -sum(flat(gradients(step, rank)) for rank in range(hvd.size())
                                             for step in range(4)))


def check_several_optimizers_after_one_backward_pass() -> None:
    """Whose gradients come first differs between the ranks."""
    several = [parameters(), parameters()]
    optimizers = [distribute(params, DENSE, op=hvd.Sum) for params in several]
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
        distribute(parameters(), DENSE)
    for _ in range(2):
        params = parameters()
        optimizer = distribute(params, DENSE, op=hvd.Sum)
        for step in range(2):
            plain_step(optimizer, params, step)
        assert_equal_everywhere(params.values())


def check_a_density_that_is_set_before_the_step_is_for_that_step() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.1))
    for step, density in enumerate((0.1, 0.5, 0.2, 0.2)):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        set_density(optimizer, density)
        optimizer.step()
        assert step_report(optimizer).k == round(density * 71), step
