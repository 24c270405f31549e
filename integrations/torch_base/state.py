"""Residuals and counters in `state_dict`.

The entry in a state_dict is a list with one record for each rank that it holds: `optimizer.state_dict()` holds this
rank's own, `gather_state_dict` all of them. It never lies in `optimizer.state`, which broadcasts overwrite with
rank 0's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod_oktopk.errors import OptionError
from horovod_oktopk.state.records import Record, check_records, residual_of
from horovod_oktopk.torch_base.registry import is_dense, own_run_of, run_of
from horovod_oktopk.torch_base.tensors import Parameters

KEY = "horovod_oktopk"
LOST = ("the state has no residual of this package, as one that torch.distributed.checkpoint has made or a plain "
        "optimizer: what this rank has not sent is dropped. Save gather_state_dict(optimizer) beside it to keep that")


def add_state(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Add the mode's state to a state_dict, as a hook of a distributed optimizer; its `load_state_dict` takes it."""
    run = own_run_of(optimizer)
    if run.carries_residuals:
        state_dict |= state_of(run.records())


def loader_of(optimizer: Any, state_dict: Mapping[str, Any]) -> Callable[[], None]:
    """Return what loads a state_dict's records. Raise OptionError if they do not fit; nothing is loaded before."""
    run = run_of(optimizer)
    if run is None or not run.carries_residuals:
        return lambda: None
    records = records_of(state_dict)
    if run.mode is None:
        _check_shapes(records, run.parameters)
    part = None if run.mode is None else run.mode.part_of(records)
    is_lost = KEY not in state_dict and part is not None

    def load() -> None:
        if is_lost:
            warnings.warn(LOST, stacklevel=3)
        run.load(records, part)

    return load


def _check_shapes(records: Sequence[Record], parameters: Parameters) -> None:
    """Raise OptionError if a record has another shape for a parameter's name; all else the first step checks."""
    ours = {parameters.name_of(p): p.shape for p in parameters.all()}
    for theirs in ({name: torch.Size(shape) for name, shape in record["parameters"]} for record in records):
        other = next((name for name, shape in theirs.items() if ours.get(name, shape) != shape), None)
        if other is not None:
            there, here = (sum(shape.numel() for shape in each.values()) for each in (theirs, ours))
            raise OptionError(f"the checkpoint's residual is of other parameters ({there} elements; these have "
                              f"{here}): it has '{other}' {tuple(theirs[other])} where this model has "
                              f"{tuple(ours[other])}. Load one of this model")


@contextmanager
def residuals_apart(optimizer: Any) -> Iterator[None]:
    """Inside, state_dict and load_state_dict of an optimizer have no residuals: each rank keeps its own."""
    run = run_of(optimizer)
    if run is None:
        yield
        return
    run.carries_residuals = False
    try:
        yield
    finally:
        run.carries_residuals = True


def gather_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with the residuals of all ranks, for a checkpoint in one file.

    It is called on all ranks together. Load the result on every rank with `optimizer.load_state_dict`: at the same
    number of ranks each gets its own residual back; at another what was not sent keeps its effect.

    Args:
        optimizer: made with `compression=OkTopk(...)`, or another scheme of this package.

    Returns:
        The state, on rank 0 with the residuals of all ranks, for which it needs P · n elements of memory; on the
        other ranks with their own residual only, which is all that they return of a ZeroRedundancyOptimizer. With
        `Dense()` there are none.

    Raises:
        PluginError: The optimizer was not made with `compression=OkTopk(...)`.

    Examples:
        >>> state = gather_state_dict(optimizer)
        >>> if rank == 0:
        ...     torch.save(state, path)
    """
    if is_dense(optimizer):
        return optimizer.state_dict()
    run = own_run_of(optimizer)
    run.synchronize_replicas()
    everyone = run.gathered("gather the state (gather_state_dict)")
    if is_sharded(type(optimizer)):
        optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
        if run.ranks.membership().rank != 0:
            return state_of(everyone)
    return {**optimizer.state_dict(), **state_of(everyone)}


def is_sharded(optimizer: type) -> bool:
    """Return True for a ZeroRedundancyOptimizer, of which each rank has a part."""
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in optimizer.__mro__)


def state_of(records: Iterable[Record]) -> dict[str, Any]:
    """Return records as a state_dict has them: with tensors, so that torch.load(weights_only=True) reads them."""
    return {KEY: [{**record, "residual": torch.from_numpy(record["residual"])} for record in records]}


def records_of(state_dict: Mapping[str, Any]) -> list[Record]:
    """Return the records of a state_dict, which may have none. Raise OptionError if one is damaged."""
    saved = state_dict.get(KEY, [])
    check_records(saved)
    records = [_to_numpy(record) for record in saved]
    for each in records:  # of all ranks, and before anything is taken: so all ranks refuse the same file
        residual_of(each, each["residual"].dtype)
    return records


def _to_numpy(record: dict[str, Any]) -> dict[str, Any]:
    residual = record["residual"]
    if not isinstance(residual, torch.Tensor) or residual.dtype not in (torch.float32, torch.float64):
        came = residual.dtype if isinstance(residual, torch.Tensor) else type(residual).__name__
        raise OptionError(f"the state is damaged: the residual of rank {record['rank']} must be a tensor of float32 "
                          f"or float64; got {came}")
    return {**record, "residual": residual.cpu().numpy()}
