"""Features of horovod_oktopk.distributed: broadcasts, groups, and what is refused."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

from horovod_oktopk import OptionError, Partial, PluginError
from horovod_oktopk.distributed import (
    Dense,
    DistributedOptimizer,
    OkTopk,
    StepAhead,
    broadcast_optimizer_state,
    broadcast_parameters,
    gather_state_dict,
    shared_parameters,
    step_report,
)
from horovod_oktopk.torch_base.registry import own_run_of
from tests.scenarios.common import needs_ranks
from tests.torch.library import hvd
from tests.torch.scenarios.common import (
    assert_equal_everywhere,
    everywhere,
    flat,
    parameters,
    raised_everywhere,
    take_steps,
    total,
)

OPTIONS = OkTopk(density=0.1)


def different_on_each_rank() -> torch.nn.Module:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    model(torch.randn(5, 4, dtype=torch.float64))
    return model


def check_neither_horovod_nor_mpi_is_imported() -> None:
    assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "mpi4py")]


def check_the_optimizer_sends_rank_0s_parameters() -> None:
    model = different_on_each_rank()
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), OPTIONS)
    assert_equal_everywhere(model.parameters())
    if hvd.size() > 1:
        assert len(set(everywhere(model[1].running_mean.sum().item()))) > 1, "buffers are the model's"
        broadcast_parameters(model)
        assert_equal_everywhere(model.state_dict().values())


def check_parameters_of_another_root_and_as_pairs() -> None:
    root = hvd.size() - 1
    for pairs in (lambda model: model, lambda model: model.state_dict(),
                  lambda model: list(model.named_parameters())):
        model = different_on_each_rank()
        mine = model[0].weight.sum().item()
        broadcast_parameters(pairs(model), root_rank=root)
        assert model[0].weight.sum().item() == everywhere(mine)[root]


def check_buffers_that_are_not_saved_are_sent_and_expanded_ones_refused() -> None:
    model = different_on_each_rank()
    model.register_buffer("random", torch.randn(3), persistent=False)
    broadcast_parameters(model)
    assert_equal_everywhere(model.buffers())
    model.register_buffer("expanded", torch.zeros(1).expand(3))
    if hvd.size() > 1:
        messages = raised_everywhere(PluginError, lambda: broadcast_parameters(model))
        assert "make it contiguous()" in messages[0]


def check_a_broadcast_optimizer_state_leaves_residuals() -> None:
    needs_ranks(hvd)
    params = parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0, momentum=0.5), params.items(), OPTIONS)
    take_steps(optimizer, params, 0, 1)
    before = optimizer.state_dict()["horovod_oktopk"][0]["residual"]
    for number in (float, np.float64):
        optimizer.param_groups[0]["lr"] = number(1.0 + hvd.rank())
        broadcast_optimizer_state(optimizer)
        assert everywhere(optimizer.param_groups[0]["lr"]) == [1.0] * hvd.size()
    assert torch.equal(optimizer.state_dict()["horovod_oktopk"][0]["residual"], before)
    assert len(optimizer.state) == len(params)


def check_a_state_that_is_broadcast_between_steps_leaves_step_ahead_as_it_is() -> None:
    for inside in (False, True):
        params = parameters()
        optimizer = DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0, momentum=0.5), params.items(),
                                         StepAhead(OPTIONS))
        take_steps(optimizer, params, 0, 1)
        with shared_parameters(optimizer) if inside else nullcontext():
            broadcast_optimizer_state(optimizer)
        take_steps(optimizer, params, 2, 3)
        with shared_parameters(optimizer):
            assert_equal_everywhere(params.values())
            assert step_report(optimizer).step == 4


def check_the_group_of_all_ranks_is_the_same_by_default_and_by_name() -> None:
    models = [parameters(), parameters()]
    optimizers = [DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items(), StepAhead(OPTIONS),
                                       process_group=group)
                  for params, group in zip(models, (None, dist.group.WORLD), strict=True)]
    first, second = (own_run_of(each).ranks.channel for each in optimizers)
    assert second == first + 1, "their messages do not meet"
    for step in range(3):
        for optimizer, params in zip(optimizers, models, strict=True):
            take_steps(optimizer, params, step)
    with shared_parameters(optimizers):
        for one, other in zip(models[0].values(), models[1].values(), strict=True):
            assert torch.equal(one, other)


def check_optimizers_go_on_if_torch_distributed_is_started_anew() -> None:
    """Make one before and one after that: their messages do not meet."""
    models, optimizers, rank, size = [parameters(), parameters()], [], hvd.rank(), hvd.size()
    # A store of its own: in that of before, PyTorch finds the addresses of before.
    here = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = everywhere(here and here.port)[0]
    for params in models:
        if optimizers:
            with shared_parameters(optimizers):
                dist.destroy_process_group()
            store = here or dist.TCPStore("localhost", port)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        optimizers.append(DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items(),
                                               StepAhead(OPTIONS)))
        take_steps(optimizers[-1], params, 0, 1)
    for step in range(2, 6):
        for optimizer, params in zip(optimizers, models, strict=True):
            take_steps(optimizer, params, step + 10 * (params is models[0]))
    assert len({own_run_of(each).ranks.channel for each in optimizers}) == 2
    for optimizer, params in zip(optimizers, models, strict=True):
        with shared_parameters(optimizer):
            assert_equal_everywhere(params.values())


def check_a_process_that_is_forked_may_drop_an_optimizer() -> None:
    """Collect garbage in a DataLoader's worker, where Gloo has no threads that its end could wait for."""
    made = []

    class Items(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, place: int) -> int:
            made.clear()
            gc.collect()
            return place

    params = parameters()
    made.append(DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items(),
                                     StepAhead(OPTIONS, overlap=False)))
    take_steps(made[0], params, 0, 1)
    assert [int(each) for each in torch.utils.data.DataLoader(Items(), batch_size=None, num_workers=1, timeout=30,
                                                              multiprocessing_context="fork")] == [0, 1]
    take_steps(made[0], params, 2)


def check_a_group_that_some_ranks_alone_have_made_disturbs_nobody() -> None:
    """Count on no counter of PyTorch's, which ranks may have at different values."""
    needs_ranks(hvd)
    if hvd.rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    params = parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items(),
                                     StepAhead(OkTopk(density=0.1, hierarchical=True)))
    take_steps(optimizer, params, 0, 1, 2)
    assert gather_state_dict(optimizer)["horovod_oktopk"]


def check_sharded_parameters_are_refused() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),))
    p = torch.nn.Parameter(distribute_tensor(torch.ones(4 * hvd.size(), 3), mesh, [Shard(0)]))
    messages = raised_everywhere(PluginError, lambda: DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)]))
    assert "DTensor" in messages[0]
    assert "the whole model" in messages[0]


def check_a_model_in_fsdp_is_refused() -> None:
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(torch.nn.Linear(4, 3), device_id=torch.device("cpu"),
                                         use_orig_params=use_orig_params)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        messages = raised_everywhere(PluginError,
                                     lambda made=optimizer: DistributedOptimizer(made, compression=OPTIONS))
        assert "sharded (FullyShardedDataParallel)" in messages[0]
        assert all(map(torch.equal, before, model.parameters()))


def check_what_is_not_for_torchrun_is_refused() -> None:
    def make(compression: object, **arguments: object) -> object:
        params = parameters()
        return DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items(), compression,
                                    **arguments)

    assert "horovodrun --mpi" in raised_everywhere(PluginError, lambda: make(Partial(OPTIONS)))[0]
    for dense in (Dense, Dense(), None, "oktopk"):
        assert "DistributedDataParallel" in raised_everywhere(OptionError, lambda given=dense: make(given))[0]
    assert "ReduceOp.AVG" in raised_everywhere(PluginError, lambda: make(OPTIONS, op=dist.ReduceOp.MAX))[0]
    lazy = torch.optim.SGD(torch.nn.LazyLinear(3).parameters(), lr=1.0)
    assert "run a forward pass first" in raised_everywhere(PluginError, lambda: DistributedOptimizer(lazy))[0]


def check_an_optimizer_that_steps_parts_and_sends_them() -> None:
    """With OkTopk a part's rank has the reduced gradient; with StepAhead it would train on its own data alone."""
    def zero() -> tuple[dict[str, torch.nn.Parameter], ZeroRedundancyOptimizer]:
        params = parameters()
        return params, ZeroRedundancyOptimizer(list(params.values()), torch.optim.SGD, lr=1.0)

    params, optimizer = zero()
    for step in range(2):
        take_steps(DistributedOptimizer(optimizer, params.items(), OkTopk(density=1.0), op=hvd.Sum) if not step
                   else optimizer, params, step)
    assert np.array_equal(flat(params), -total(0, 1))
    params, optimizer = zero()
    (message,) = set(raised_everywhere(
        PluginError, lambda: DistributedOptimizer(optimizer, params.items(), StepAhead(OPTIONS))))
    assert "ZeroRedundancyOptimizer cannot be used with StepAhead" in message


def model_of(params: dict[str, torch.nn.Parameter]) -> torch.nn.Module:
    """Return a module that has these parameters, whose names may have no dots there."""
    return torch.nn.ParameterDict({name.replace(".", "_"): p for name, p in params.items()})


def check_a_state_that_torch_makes_by_a_step_exchanges_nothing() -> None:
    """Check SGD without momentum, which never has a state: torch.distributed.checkpoint takes a step at each save."""
    for compression in (OPTIONS, StepAhead(OPTIONS)):
        found = []
        for saves in (False, True):
            params = parameters()
            optimizer = DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items(), compression)
            for step in range(4):
                take_steps(optimizer, params, step)
                optimizer.zero_grad()
                with shared_parameters(optimizer):
                    optimizer.state_dict()
                    if saves:
                        get_optimizer_state_dict(model_of(params), optimizer)
            with shared_parameters(optimizer):
                residual = optimizer.state_dict()["horovod_oktopk"][0]["residual"]
                found.append((flat(params), residual.numpy()))
            assert step_report(optimizer).step == 4
        assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


def check_parameters_that_are_broadcast_in_mid_training_leave_what_was_not_sent() -> None:
    params = parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items(), StepAhead(OPTIONS))
    take_steps(optimizer, params, 0, 1)
    with shared_parameters(optimizer):
        before = optimizer.state_dict()["horovod_oktopk"][0]["residual"]
    broadcast_parameters(model_of(params))
    broadcast_parameters(model_of(params).state_dict())
    with shared_parameters(optimizer):
        assert torch.equal(optimizer.state_dict()["horovod_oktopk"][0]["residual"], before)
    take_steps(optimizer, params, 2)
    with shared_parameters(optimizer):
        assert_equal_everywhere(params.values())


def check_a_root_that_is_no_rank_is_refused() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    for root in (-1, hvd.size(), "x", 1.0):
        for send, what in ((broadcast_parameters, params), (broadcast_optimizer_state, optimizer)):
            messages = raised_everywhere(OptionError, partial(send, what, root))
            assert f"got {root!r}" in messages[0], messages


def check_a_sharded_optimizer_is_gathered_on_rank_0() -> None:
    params = parameters()
    made = ZeroRedundancyOptimizer([*params.values()], torch.optim.SGD, lr=1.0, momentum=0.5)
    optimizer = DistributedOptimizer(made, params.items(), OPTIONS)
    take_steps(optimizer, params, 0, 1)
    state = gather_state_dict(optimizer)
    assert len(state["horovod_oktopk"]) == (hvd.size() if hvd.rank() == 0 else 1)
    assert ("state" in state) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        assert len(state["state"]) == len(params)
