"""DistributedDataParallel, which reduces gradients itself: it is refused, unless it keeps quiet."""

# No `from __future__ import annotations`: register_comm_hook compares the hook's annotations with classes.
import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_oktopk.distributed.private import hooks_of, is_flattened
from horovod_oktopk.errors import PluginError
from horovod_oktopk.torch_base.registry import runs_over

WRAPPED = ("the model is in DistributedDataParallel, which reduces whole gradients itself. Train the plain model: "
           "the optimizer reduces. Or call leave_gradients(model) once, if something else needs the DDP model")
NOT_WRAPPED = ("leave_gradients takes a model in DistributedDataParallel; got {kind}. A plain model needs no call. "
               "If a trainer should have wrapped it, see whether the trainer knows of all ranks of torchrun")
SHARDED = ("the parameters are sharded ({kind}), so that each rank has others. Distributed optimizers of this "
           "package are for data-parallel training: give them the whole model on every rank")


def local_gradients_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG001
    """Leave gradients as they are; a communication hook of DistributedDataParallel.

    Args:
        state: not used by the hook; None.
        bucket: given by DistributedDataParallel.

    Returns:
        A future of the bucket's own gradients, shape (elements of the bucket,).
    """
    buffer = bucket.buffer()
    future = future_for(buffer)
    future.set_result(buffer)
    return future


def future_for(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that can hold this tensor, or another on its device."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])


def leave_gradients(model: torch.nn.Module) -> None:
    """Have a model in DistributedDataParallel leave gradients to our optimizer, before its first backward pass.

    Args:
        model: in DistributedDataParallel, without a communication hook; or a module around it, as Fabric's.

    Raises:
        PluginError: The model is not in DistributedDataParallel.

    Examples:
        >>> leave_gradients(ddp_model)
        >>> optimizer = DistributedOptimizer(optimizer, ddp_model.module.named_parameters())
    """
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not wrapped:
        raise PluginError(NOT_WRAPPED.format(kind=type(model).__name__))
    for module in wrapped:
        if not _is_quiet(module):
            module.register_comm_hook(id(module), local_gradients_hook)
        for run in runs_over(module.parameters()):
            run.warn_if_overwritten()


def refuse_sharded(parameters: Iterable[torch.Tensor]) -> None:
    """Raise PluginError if one of these parameters is sharded."""
    for p in parameters:
        kind = "FullyShardedDataParallel" if is_flattened(p) else type(p).__name__
        if kind in ("FullyShardedDataParallel", "DTensor"):
            raise PluginError(SHARDED.format(kind=kind))


def refuse_ddp(parameters: Sequence[torch.Tensor]) -> None:
    """Raise PluginError if DDP reduces the gradients of one of these parameters."""
    if not all(map(_is_quiet, models_over(parameters))):
        raise PluginError(WRAPPED)


def _is_quiet(model: DistributedDataParallel) -> bool:
    """Return True if a model leaves gradients alone. A copy does not: it has the list of hooks, and none of them."""
    return any(hook is local_gradients_hook and state in (None, id(model)) for hook, state in hooks_of(model))


def models_over(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the models in DistributedDataParallel, of this process, that have one of these parameters."""
    wanted = set(parameters)
    copied = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in dict.fromkeys([*_made, *copied]) if any(p in wanted for p in each.parameters())]


_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Models made since this was imported: the garbage collector does not tell of those that `gc.freeze()` has hidden."""


def _note(model: torch.nn.Module, name: str, _: torch.nn.Module | None) -> None:
    if isinstance(model, DistributedDataParallel) and name == "module":
        _made.add(model)


torch.nn.modules.module.register_module_module_registration_hook(_note)
