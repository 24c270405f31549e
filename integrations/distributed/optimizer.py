"""Distributed optimizers under torchrun: the functions that programs call, in the words of horovod.torch."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from horovod_oktopk.distributed.ddp import refuse_sharded
from horovod_oktopk.distributed.groups import NO_GROUP
from horovod_oktopk.distributed.peers import GroupPeers
from horovod_oktopk.errors import OptionError, PluginError
from horovod_oktopk.modes.make import kind_of
from horovod_oktopk.schemes import OkTopk, own_options
from horovod_oktopk.schemes.options import check_integer
from horovod_oktopk.torch_base import make
from horovod_oktopk.torch_base.registry import holders_of
from horovod_oktopk.torch_base.state import residuals_apart

DENSE = ("DistributedOptimizer takes OkTopk(...) or other options of this package; got {given!r}. For dense "
         "gradients use torch.nn.parallel.DistributedDataParallel")
ROOT = "root_rank must be less than {size}, the group's number of ranks; got {root_rank}: give a number in the group"
LAZY = ("the model has lazy parameters, which have no values yet that rank 0 could give the others: run a forward "
        "pass first, and make the optimizer after it")
OP = "op must be dist.ReduceOp.AVG or dist.ReduceOp.SUM; got {op!r}"


def DistributedOptimizer(optimizer: torch.optim.Optimizer, named_parameters: Any = None,  # noqa: N802
                         compression: Any = OkTopk, *, op: Any = dist.ReduceOp.AVG, sparse_as_dense: bool = False,
                         process_group: Any = None, broadcast: bool = True) -> torch.optim.Optimizer:
    """Distribute the steps of a plain optimizer, whose model is not in DistributedDataParallel. Collective.

    Args:
        optimizer: of PyTorch, or any other whose `step` takes a step.
        named_parameters: `model.named_parameters()`; without it parameters have numbers.
        compression: options of this package, but for `Partial`.
        op: `dist.ReduceOp.AVG` or `dist.ReduceOp.SUM`.
        sparse_as_dense: whether sparse gradients are made dense, and reduced with the others.
        process_group: the ranks; None is all ranks. On ranks outside of it, the optimizer trains for itself.
        broadcast: whether rank 0's parameters are sent to the others now, as DistributedDataParallel does. Buffers
            are not the optimizer's: call `broadcast_parameters(model)` if the model has some.

    Returns:
        The same optimizer: its `step` now exchanges what `compression` says.

    Raises:
        PluginError: torch.distributed has not been started, or this optimizer or compression cannot be distributed.
        OptionError: An option is not allowed.
        ValueError: Names are missing, or come twice.

    Examples:
        >>> dist.init_process_group("gloo")
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), OkTopk(density=0.01))
    """
    _check_started()
    options = own_options(compression)
    if options is None:
        raise OptionError(DENSE.format(given=compression))
    kind_of(options).check("torchrun")
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        raise PluginError(OP.format(op=op))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    refuse_sharded(parameters)
    if broadcast and any(map(is_lazy, parameters)):
        raise PluginError(LAZY)
    make.make(optimizer, options, named_parameters, op == dist.ReduceOp.AVG, sparse_as_dense,
              functools.partial(GroupPeers, process_group), __name__)
    if broadcast:
        GroupPeers(process_group).broadcast(parameters, 0)
    return optimizer


def broadcast_parameters(model: Any, root_rank: int = 0, process_group: Any = None) -> None:
    """Give all ranks the parameters and buffers of one. Collective.

    Args:
        model: a module; or its `state_dict()`, or pairs of names and tensors, as for `hvd.broadcast_parameters`.
        root_rank: the rank's number in the group.
        process_group: the ranks; None is all ranks.

    Examples:
        >>> broadcast_parameters(model)
    """
    peers = _peers_of(process_group, root_rank)
    if isinstance(model, torch.nn.Module):  # its state_dict may lack buffers
        model = [*model.named_parameters(), *model.named_buffers()]
    pairs: Iterable[Any] = model.items() if isinstance(model, Mapping) else model
    tensors = [tensor for _, tensor in pairs if isinstance(tensor, torch.Tensor)]
    with ExitStack() as stack:  # where StepAhead trains them, what a rank has not sent stays
        for run in holders_of(tensors):
            stack.enter_context(run.shared())
        peers.broadcast(tensors, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0,
                              process_group: Any = None) -> None:
    """Give all ranks the state of one rank's optimizer: momentum, learning rates. Residuals stay each rank's own.

    Args:
        optimizer: plain or distributed.
        root_rank: the rank's number in the group.
        process_group: the ranks; None is all ranks. Collective on these.

    Examples:
        >>> broadcast_optimizer_state(optimizer)
    """
    peers = _peers_of(process_group, root_rank)
    if not peers.ranks.takes_part:
        return
    is_root, file = peers.ranks.membership().rank == root_rank, io.BytesIO()
    with residuals_apart(optimizer):
        if is_root:
            torch.save(optimizer.state_dict(), file)
        states = peers.objects(file.getvalue())
        if not is_root:
            # Rates may be NumPy's, which weights_only refuses; the bytes have just come from a rank of this job.
            optimizer.load_state_dict(
                torch.load(io.BytesIO(states[root_rank]), map_location="cpu", weights_only=False))


def _peers_of(process_group: Any, root_rank: int) -> GroupPeers:
    """Return the ranks of a group. Raise PluginError if there is none yet, OptionError if it has no such rank."""
    _check_started()
    peers = GroupPeers(process_group)
    check_integer("root_rank", root_rank, least=0)
    if peers.ranks.takes_part and root_rank >= peers.ranks.membership().size:
        raise OptionError(ROOT.format(size=peers.ranks.membership().size, root_rank=root_rank))
    return peers


def _check_started() -> None:
    if not dist.is_initialized():
        raise PluginError(NO_GROUP)
