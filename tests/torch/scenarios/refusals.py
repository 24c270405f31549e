"""Bad input: a clear error, before any communication, and the job goes on."""

from __future__ import annotations

import torch

from horovod_oktopk import AgreementError, OptionError, PluginError
from tests.scenarios.common import DENSE, needs_ranks
from tests.torch.library import OkTopk, SameBlocks, StepAhead, hvd, step_report
from tests.torch.scenarios.common import distribute, made, parameters, raised_everywhere, take_steps


def check_parameters_that_differ_when_the_ranks_meet() -> None:
    """Forgotten broadcasts, a checkpoint that some ranks have found, and layers that come later."""
    needs_ranks(hvd)
    for compression in (OkTopk(density=0.5), SameBlocks(), StepAhead(OkTopk(density=0.5))):
        params, optimizer = made(compression)
        with torch.no_grad():
            params["d"].add_(float(hvd.rank()))
        for _ in range(2):
            message = raised_everywhere(AgreementError, lambda made=(optimizer, params): take_steps(*made, 0))[0]
            assert "which must be the same everywhere before the first step" in message
        with torch.no_grad():
            params["d"].zero_()
        if not isinstance(compression, StepAhead):
            take_steps(optimizer, params, 0)
            late = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
            optimizer.add_param_group({"params": [late]})
            late.grad = torch.ones(3)
            assert "which must be the same everywhere" in raised_everywhere(AgreementError, optimizer.step)[0]


def check_a_lone_allreduce_is_refused() -> None:
    messages = raised_everywhere(PluginError, lambda: hvd.allreduce(torch.ones(3), compression=OkTopk()))
    assert "DistributedOptimizer" in messages[0]


def check_a_factory_that_was_imported_before_the_plugin_says_so() -> None:
    """Stock Horovod's own function; alone it reduces nothing."""
    needs_ranks(hvd)
    for compression in (OkTopk, OkTopk(), StepAhead(OkTopk)):
        model = torch.nn.Linear(3, 1)
        stock = hvd.DistributedOptimizer.__wrapped__(torch.optim.SGD(model.parameters(), lr=0.1),
                                                     compression=compression)

        def step(model: torch.nn.Module = model, stock: torch.optim.Optimizer = stock) -> None:
            model(torch.ones(2, 3)).sum().backward()
            stock.step()

        assert "import it before `from horovod.torch import" in raised_everywhere(PluginError, step)[0]


def check_complex_gradients_are_refused() -> None:
    def step() -> None:
        weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        optimizer = distribute({"w": weight}, DENSE)
        weight.abs().sum().backward()
        optimizer.step()

    assert "'w'" in raised_everywhere(OptionError, step)[0]


def check_a_report_of_another_optimizer_is_refused() -> None:
    optimizer = distribute(parameters(), hvd.Compression.none)
    assert "compression=OkTopk" in raised_everywhere(PluginError, lambda: step_report(optimizer))[0]


def check_what_is_no_compression_is_refused() -> None:
    model = torch.nn.Linear(3, 1)
    for wrong in ("oktopk", None, 0.01, hvd.Compression):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert f"got {wrong!r}" in raised_everywhere(
            OptionError, lambda o=optimizer, w=wrong: hvd.DistributedOptimizer(o, compression=w))[0]


class Sharpness(torch.optim.SGD):
    """An optimizer that takes two steps with two gradients; step() serves a closure."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class ClosureOnly(torch.optim.SGD):
    def step(self, closure): ...


class MADGRAD(torch.optim.SGD): ...


class ScheduleFree(torch.optim.SGD):
    def eval(self) -> None: ...

    def train(self) -> None: ...


def check_an_optimizer_whose_work_is_not_in_its_step_is_refused_by_name() -> None:
    for compression in (DENSE, StepAhead(OkTopk)):
        for inner in (Sharpness, ClosureOnly):
            params = parameters()
            [*messages] = raised_everywhere(PluginError, lambda c=compression, p=params, o=inner: distribute(
                p, c, o(p.values(), lr=0.1)))
            assert messages[0].startswith(inner.__name__), messages
    params = parameters()
    assert "ScheduleFree cannot be used with StepAhead" in raised_everywhere(
        PluginError, lambda: distribute(params, StepAhead(OkTopk), ScheduleFree(params.values(), lr=0.1)))[0]
    assert "MADGRAD cannot be used with StepAhead" in raised_everywhere(
        PluginError, lambda: distribute(params, StepAhead(OkTopk), MADGRAD(params.values(), lr=0.1)))[0]
    for inner in (ScheduleFree, MADGRAD):
        distribute(params, DENSE, inner(params.values(), lr=0.1))


def check_an_optimizer_without_a_learning_rate_is_told_what_to_give() -> None:
    needs_ranks(hvd)
    params = parameters()
    optimizer = distribute(params, StepAhead(OkTopk(density=0.2)))
    optimizer.param_groups[0]["lr"] = None
    message = raised_everywhere(OptionError, lambda: take_steps(optimizer, params, 0))[0]
    assert "SGD has no learning rate" in message, message
    assert "StepAhead(..., ahead=1, gain=None)" in message, message


def check_parameters_without_memory_are_refused() -> None:
    model = torch.nn.Linear(3, 1, device="meta")
    for compression in (DENSE, StepAhead(OkTopk)):
        message = raised_everywhere(PluginError, lambda c=compression: distribute(model, c))[0]
        assert "'weight' is on the meta device" in message, message
