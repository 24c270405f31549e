"""A model in DistributedDataParallel: refused, or quiet."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod_oktopk import PluginError
from horovod_oktopk.distributed import DistributedOptimizer, OkTopk, StepAhead, leave_gradients, shared_parameters
from tests.scenarios.common import logged
from tests.torch.library import hvd
from tests.torch.scenarios.common import assert_equal_everywhere, flat, raised_everywhere

OPTIONS = (OkTopk(density=0.1), StepAhead(OkTopk(density=0.1)))


def model_of() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def trained(compression: object, wrappers: tuple[type[torch.nn.Module], ...]) -> dict[str, torch.Tensor]:
    model = plain = model_of()
    for wrapper in wrappers:
        model = wrapper(model)
    if wrappers:
        leave_gradients(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), plain.named_parameters(),
                                     compression)
    for step in range(6):
        torch.manual_seed(10 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    with shared_parameters(optimizer):
        return {name: p.detach().clone() for name, p in plain.named_parameters()}


def check_a_model_in_ddp_is_refused_at_the_first_step() -> None:
    for compression in OPTIONS:
        model = DistributedDataParallel(model_of())
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                         compression)
        model(torch.randn(8, 6)).square().mean().backward()
        (message,) = set(raised_everywhere(PluginError, optimizer.step))
        assert "Train the plain model" in message
        assert "leave_gradients" in message


def check_a_model_in_ddp_that_the_garbage_collector_does_not_know_is_refused() -> None:
    model = DistributedDataParallel(model_of())
    gc.freeze()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                     OPTIONS[0])
    model(torch.randn(8, 6)).square().mean().backward()
    assert "Train the plain model" in raised_everywhere(PluginError, optimizer.step)[0]


def check_a_model_that_is_put_into_ddp_anew_is_told() -> None:
    """DDP sends rank 0's values over all ranks', which drops what they have not sent."""
    plain = model_of()
    model = DistributedDataParallel(plain)
    leave_gradients(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), plain.named_parameters(),
                                     OPTIONS[1])
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    for inside in (True, False):
        with logged() as messages, shared_parameters(optimizer) if inside else nullcontext():
            leave_gradients(DistributedDataParallel(plain))
        assert len(messages) == (not inside), messages
        assert inside or "make DistributedDataParallel anew inside" in messages[0]


def check_a_plain_model_is_told_that_it_is_not_in_ddp() -> None:
    (message,) = set(raised_everywhere(PluginError, lambda: leave_gradients(model_of())))
    assert "got Sequential" in message


def check_a_model_in_ddp_that_leaves_gradients_gives_the_plain_models_bits() -> None:
    """Also if a module is around it, as Fabric's."""
    for compression in OPTIONS:
        plain = trained(compression, ())
        for wrappers in ((DistributedDataParallel,), (DistributedDataParallel, torch.nn.Sequential)):
            ours = trained(compression, wrappers)
            assert_equal_everywhere(ours.values())
            assert (flat(ours) == flat(plain)).all()


def check_a_copy_of_a_model_in_ddp_is_to_be_told_itself_and_often_is_as_once() -> None:
    """Otherwise a copy reduces gradients itself, though it has the list of the original's hooks."""
    original = DistributedDataParallel(model_of())
    leave_gradients(original)
    leave_gradients(original)
    model = copy.deepcopy(original)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                     OPTIONS[0])
    model(torch.randn(8, 6)).square().mean().backward()
    (message,) = set(raised_everywhere(PluginError, optimizer.step))
    assert "leave_gradients" in message
    model = copy.deepcopy(original)
    leave_gradients(model)
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), OPTIONS[0]).step()
