"""Features of hvd.DistributedOptimizer that go on working: compared with stock Horovod, at density 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from horovod_oktopk import AgreementError, PluginError
from tests.scenarios.common import DENSE, is_last, k_of, needs, needs_ranks
from tests.torch.library import OkTopk, Partial, StepAhead, hvd, set_density, step_report, synchronize_replicas
from tests.torch.scenarios.common import (
    Params,
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
    record_of,
    take_steps,
    total,
)

Step = Callable[[Any, Params, int], None]


def train(compression: Any, take_step: Step = take_steps, **arguments: Any) -> np.ndarray:
    """Return the parameters after four steps."""
    params, optimizer = made(compression, **arguments)
    for step in range(4):
        take_step(optimizer, params, step)
    assert_equal_everywhere(params.values())
    return flat(params)


def assert_like_stock(take_step: Step, **arguments: Any) -> None:
    """Compare with stock Horovod, but for rounding: stock multiplies by 1/P where we divide by P."""
    stock, ours = (train(compression, take_step, **arguments) for compression in (hvd.Compression.none, DENSE))
    assert np.abs(stock).max() > 1
    np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-4)


def check_synchronize_and_clip() -> None:
    def take_step(optimizer: Any, params: Params, step: int) -> None:
        optimizer.zero_grad()
        backward(params, gradients(step))
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(params.values(), 10.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    assert_like_stock(take_step)


def check_the_gradients_of_a_closure_are_reduced() -> None:
    def take_step(optimizer: Any, params: Params, step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return backward(params, gradients(step))

        assert optimizer.step(closure).requires_grad

    ours = train(DENSE, take_step)
    np.testing.assert_allclose(ours, train(DENSE), rtol=0, atol=0)
    assert np.abs(ours).max() > 1


def check_lbfgs_is_refused() -> None:
    params = parameters()
    plain = torch.optim.LBFGS(params.values())
    for compression in (DENSE, StepAhead(), Partial()):
        (message,) = set(raised_everywhere(PluginError, lambda each=compression: distribute(params, each, plain)))
        assert "LBFGS" in message
        assert "another optimizer" in message
    hvd.DistributedOptimizer(plain, named_parameters=params.items())  # stock takes it


def check_closure() -> None:
    params, optimizer = made(DENSE)
    backward(params, gradients(0))
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        assert optimizer.step(lambda: torch.tensor(5.0)) == 5.0
    assert_equal_everywhere(params.values())


def check_unnamed_parameters() -> None:
    params = parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), compression=DENSE, op=hvd.Sum)
    take_steps(optimizer, params, 0)
    assert np.array_equal(flat(params), -total(0))


def check_two_backward_passes_alone() -> None:
    """Stock registers no hooks on one rank, so that any number of passes may come before a step."""
    needs(hvd.size() == 1, "one rank alone")

    def take_step(optimizer: Any, params: Params, step: int) -> None:
        optimizer.zero_grad()
        backward(params, gradients(step))
        optimizer.zero_grad()
        for each in range(2):
            backward(params, gradients(10 * step + each))
        optimizer.step()

    assert_like_stock(take_step)
    assert_like_stock(take_step, groups=2)


def check_training_goes_on_after_an_error() -> None:
    needs_ranks(hvd)
    for arguments in ({}, {"groups": 2}, {"backward_passes_per_step": 2}):
        params, optimizer = made(DENSE, op=hvd.Sum, **arguments)
        set_density(optimizer, 0.5 if hvd.rank() == 0 else 1.0)
        raised_everywhere(AgreementError, lambda made=(optimizer, params): take_steps(*made, 0))
        set_density(optimizer, 1.0)
        take_steps(optimizer, params, 1, 2)
        assert np.array_equal(flat(params), -total(1, 2))


def check_gradients_that_are_frozen_or_missing_on_one_rank_or_on_all() -> None:
    params = parameters()
    params["b.weight"].requires_grad_(False)
    optimizer = distribute(params, DENSE, op=hvd.Sum)
    given = ["d"] if hvd.rank() == 0 else ["a.bias", "d"]
    for step in range(3):
        descend(optimizer, loss_with(params, {name: gradients(step)[name] for name in given}))
    having = {"b.weight": [], "c.scale": [], "a.bias": range(1, hvd.size()), "d": range(hvd.size())}
    for name, ranks in having.items():
        expected = -sum(gradients(step, rank)[name] for step in range(3) for rank in ranks)
        assert torch.equal(params[name].detach(), expected * torch.ones_like(params[name])), name


def check_what_was_computed_before_a_parameter_froze_is_still_applied() -> None:
    half = [Partial(OkTopk(density=0.2), policy="solo")] if hvd.mpi_enabled() else []
    for compression in (OkTopk(density=0.2), *half):
        params, optimizer = made(compression, op=hvd.Sum)
        take_steps(optimizer, params, 0, 1)
        synchronize_replicas(optimizer)
        if hvd.rank() == 0:
            params["b.weight"].requires_grad_(False)
        for _ in range(40):  # steps without gradients empty the residuals
            descend(optimizer, loss_with(params, {name: torch.zeros_like(p) for name, p in params.items()}))
        synchronize_replicas(optimizer)
        assert_equal_everywhere(params.values())
        assert np.array_equal(-flat(params), total(0, 1))


def check_tied_parameters() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = torch.nn.Linear(6, 6, bias=False)
            self.decode = torch.nn.Linear(6, 6, bias=False)
            self.decode.weight = self.encode.weight

    def trained(compression: Any) -> torch.Tensor:
        model = Tied()
        torch.nn.init.ones_(model.encode.weight)
        optimizer = distribute(model, compression, op=hvd.Sum)
        descend(optimizer, model.decode(model.encode(torch.full((2, 6), float(hvd.rank() + 1)))).sum())
        return model.encode.weight.detach()

    assert torch.equal(trained(DENSE), trained(hvd.Compression.none))


def check_sparse_gradients() -> None:
    for as_dense in (False, True):
        results = []
        for compression in (hvd.Compression.none, DENSE):
            model = torch.nn.Sequential(torch.nn.Embedding(20, 3, sparse=True), torch.nn.Linear(3, 1))
            for p in model.parameters():
                torch.nn.init.ones_(p)
            optimizer = distribute(model, compression, lr=0.5, op=hvd.Sum, sparse_as_dense=as_dense)
            for step in range(3):
                descend(optimizer, model(torch.tensor([step, step + hvd.rank() + 1])).sum())
                assert model[0].weight.grad.is_sparse
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            assert_equal_everywhere(model.parameters())
        torch.testing.assert_close(results[1], results[0])


def check_nan_in_a_sparse_gradient_alone_undoes_the_step() -> None:
    """NaN skips the step whole: what the dense gradients would have sent must stay in the residual."""
    needs_ranks(hvd)
    params = {"table": torch.nn.Parameter(torch.ones(20, 3)), **parameters(shapes={"a": (4,), "b": (4,)})}
    optimizer = distribute(params, OkTopk(density=0.5))

    def step(factor: float) -> np.ndarray:
        optimizer.zero_grad()
        rows = torch.nn.functional.embedding(torch.tensor([1, 2]), params["table"], sparse=True)
        (factor * rows.sum() + loss_with(params, dict.fromkeys("ab", torch.arange(1.0, 5.0)))).backward()
        optimizer.synchronize()
        return record_of(optimizer)["residual"].numpy()

    step(1.0)
    held = step(1.0)
    assert held.any()
    for poison in (float("inf"), float("nan")):
        assert np.array_equal(step(poison if is_last(hvd) else 1.0), held)
        assert all(params[name].grad.isnan().all() for name in "ab")
        assert not step_report(optimizer).finite
    step(1.0)
    assert step_report(optimizer).finite
    assert step_report(optimizer).step == 3


def check_nan_in_a_sparse_gradient_alone_skips_the_step_of_a_scaler() -> None:
    params = {"table": torch.nn.Parameter(torch.ones(20, 3)), **parameters(shapes={"a": (4,)})}
    optimizer, scaler = distribute(params, OkTopk(density=0.5)), torch.amp.GradScaler("cpu", init_scale=4.0)
    for poison, moves in ((1.0, True), (float("nan"), False), (1.0, True)):
        before = {name: p.detach().clone() for name, p in params.items()}
        optimizer.zero_grad()
        rows = torch.nn.functional.embedding(torch.tensor([1, 2]), params["table"], sparse=True)
        loss = (poison if is_last(hvd) else 1.0) * rows.sum() + loss_with(params, {"a": torch.arange(1.0, 5.0)})
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(p, before[name]) != moves for name, p in params.items()), poison


def table_and_other(**arguments: Any) -> tuple[torch.nn.Embedding, torch.nn.Parameter, Any]:
    """Return an embedding with sparse gradients, a parameter with dense ones, and their optimizer."""
    table, other = torch.nn.Embedding(20, 3, sparse=True), torch.nn.Parameter(torch.zeros(2))
    torch.nn.init.zeros_(table.weight)
    return table, other, distribute({"e": table.weight, "o": other}, DENSE, **arguments)


def check_a_sparse_gradient_missing_on_some_ranks_or_at_first() -> None:
    """One that is missing at first has a place among the dense ones."""
    for steps, applied in (((0, 1, 2) if hvd.rank() == 0 else (0,), [hvd.size(), 1, 1, 0]),
                           ((1, 2), [0, hvd.size(), hvd.size(), 0])):
        table, other, optimizer = table_and_other(op=hvd.Sum)
        for step in range(3):
            descend(optimizer, other.sum() + (table(torch.tensor([step])).sum() if step in steps else 0))
            assert step not in steps or table.weight.grad.is_sparse
        assert_equal_everywhere([table.weight, other])
        assert table.weight.detach()[:4, 0].tolist() == [-float(each) for each in applied]


def check_a_gradient_that_becomes_dense_on_one_rank_is_told_everywhere() -> None:
    needs_ranks(hvd)
    table, other, optimizer = table_and_other()

    def step(dense: bool) -> None:
        descend(optimizer, other.sum() + (table.weight if dense else table(torch.tensor([1]))).sum())

    step(dense=False)
    raised_everywhere(AgreementError, lambda: step(dense=hvd.rank() == 0))
    raised_everywhere(PluginError, lambda: step(dense=True))


def check_the_reduced_gradient_has_the_layout_of_the_one_that_came() -> None:
    """Fused optimizers go through parameters and gradients as they lie in memory."""
    shapes = {"conv": (4, 3, 2, 2), "turned": (5, 3)}
    grads = [{name: torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()
              for name, shape in shapes.items()} for rank in range(hvd.size())]
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {"conv": torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
                   "turned": torch.zeros(3, 5).t()}
        params = {name: torch.nn.Parameter(tensor.to(dtype)) for name, tensor in tensors.items()}
        optimizer = distribute(params, DENSE, torch.optim.SGD(params.values(), lr=1.0, fused=dtype is torch.float32),
                               op=hvd.Sum)
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
    optimizer = distribute(params, DENSE, torch.optim.SGD(params.values(), lr=1.0 + hvd.rank(), momentum=0.5))
    hvd.broadcast_parameters(params, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 1.0
    take_steps(optimizer, params, 0)
    assert_equal_everywhere(params.values())


def check_a_model_without_trainable_parameters() -> None:
    params = parameters()
    for p in params.values():
        p.requires_grad_(False)
    distribute(params, DENSE).step()


def check_a_backward_pass_without_a_step_is_dropped() -> None:
    """Also where a rank lacks a gradient."""
    for lacking in ([], ["d"]):
        params, optimizer = made(DENSE, op=hvd.Sum)
        take_steps(optimizer, params, 0)
        state = optimizer.state_dict()
        optimizer.zero_grad()
        backward(params, {name: g for name, g in gradients(1).items() if hvd.rank() > 0 or name not in lacking})
        optimizer.load_state_dict(state)
        take_steps(optimizer, params, 2)
        assert np.array_equal(flat(params), -total(0, 2))
        assert step_report(optimizer).step == 2


def check_data_that_worker_processes_load() -> None:
    """They are forked while MPI and the watchdog's thread run."""
    params, optimizer = made(DENSE, op=hvd.Sum)
    take_steps(optimizer, params, 0)
    take_steps(optimizer, params, *torch.utils.data.DataLoader(range(1, 4), batch_size=None, num_workers=2,
                                                               multiprocessing_context="fork"))
    assert np.array_equal(flat(params), -total(*range(4)))


def check_several_optimizers_after_one_backward_pass() -> None:
    """Whose gradients come first differs between the ranks."""
    several = [parameters(), parameters()]
    optimizers = [distribute(params, DENSE, op=hvd.Sum) for params in several]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_with(params, gradients(10 * offset + step)) for offset, params in enumerate(several)]
        sum(reversed(losses) if hvd.rank() % 2 else losses).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    for offset, params in enumerate(several):
        assert np.array_equal(flat(params), -total(*range(10 * offset, 10 * offset + 4)))


def check_a_rank_that_made_more_optimizers_agrees_with_the_others() -> None:
    if hvd.rank() == 0:
        distribute(parameters(), DENSE)
    for _ in range(2):
        params, optimizer = made(DENSE, op=hvd.Sum)
        take_steps(optimizer, params, 0, 1)
        assert_equal_everywhere(params.values())


def check_a_density_that_is_set_before_the_step_is_for_that_step() -> None:
    params, optimizer = made(OkTopk(density=0.1))
    for step, density in enumerate((0.1, 0.5, 0.2, 0.2)):
        optimizer.zero_grad()
        backward(params, gradients(step))
        set_density(optimizer, density)
        optimizer.step()
        assert step_report(optimizer).k == k_of(hvd, density), step


def phases_that_are_missing(compression: Any, **options: Any) -> set[str]:
    """Return the phases that are missing in the profile of a step; one rank alone has none."""
    needs_ranks(hvd)
    params, optimizer = made(compression)
    take_steps(optimizer, params, 0)
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        take_steps(optimizer, params, 1)
    report = step_report(optimizer)
    assert {"accumulate", "agree", "select"} <= report.phases.keys()
    return {f"oktopk/{phase}" for phase in report.phases} - {event.key for event in profiler.key_averages()}


def check_the_profiler_shows_the_phases_of_a_step() -> None:
    assert phases_that_are_missing(OkTopk()) == set()


def check_the_profiler_of_all_threads_shows_the_exchange_of_step_ahead() -> None:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    assert phases_that_are_missing(StepAhead(overlap=False), experimental_config=everywhere) == set()
