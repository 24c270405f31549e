"""The residual and the counters in `state_dict` and `load_state_dict`, so in checkpoints and elastic jobs.

The entry is a list with one record for each rank that it holds: `optimizer.state_dict()` holds this
rank's own, `gather_state_dict` all of them. It never lies in `optimizer.state`, which Horovod overwrites
with rank 0's.
"""

from __future__ import annotations

import uuid
import warnings
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd

import torch

from ..errors import OptionError, PluginError
from .registry import reducer_of

if TYPE_CHECKING:
    from .reducer import Reducer

KEY = "horovod_oktopk"
_PROCESS = uuid.uuid4().hex


def attach_state(optimizer: Any, reducer: Reducer) -> None:
    """Makes the optimizer's state_dict carry the reducer's state, and its load_state_dict take it."""
    waiting: list[dict[str, Any]] = []  # loaded before the first step, when the parameters' layout is not known yet

    def save(_optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict[KEY] = _records(reducer) if reducer.layout is not None else waiting[:]

    def load(_optimizer: Any, state_dict: dict[str, Any]) -> None:
        waiting[:] = state_dict.get(KEY, [])
        reducer.drop()
        reducer.when_laid_out(lambda: _load(reducer, waiting))

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def gather_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with the residuals of all ranks, for a checkpoint in one file.

    Called on all ranks together; the ranks other than 0 get their own residual only. Rank 0 needs
    P * n elements of memory. Load the result on every rank with `optimizer.load_state_dict`: at the same
    number of ranks each gets its own residual back; at another the sum of the residuals is kept.
    """
    state_dict = optimizer.state_dict()
    reducer = reducer_of(optimizer)
    if reducer is None:
        raise PluginError("gather_state_dict needs an optimizer made with compression=OkTopk(...)")
    records = state_dict[KEY]
    if not records:
        return state_dict
    own = records[0]
    plain = {name: value for name, value in own.items() if name != "residual"}
    everyone = []
    for root in reducer.process_set.ranks or range(hvd.size()):
        record = hvd.broadcast_object(plain, root, name="horovod_oktopk.record", process_set=reducer.process_set)
        residual = hvd.broadcast(own["residual"], root, name="horovod_oktopk.residual",
                                 process_set=reducer.process_set)
        if own["rank"] == 0:
            everyone.append({**record, "residual": residual})
    if own["rank"] == 0:
        state_dict[KEY] = everyone
    return state_dict


def _records(reducer: Reducer) -> list[dict[str, Any]]:
    return [{"rank": reducer.process_set.rank(), "size": reducer.process_set.size(), "process": _PROCESS,
             "residual": reducer.residual.clone().cpu(), "residual_scale": reducer.residual_scale,
             "algorithm": reducer.algorithm.state()}]


def _load(reducer: Reducer, records: list[dict[str, Any]]) -> None:
    rank, size = reducer.process_set.rank(), reducer.process_set.size()
    for record in records:
        if len(record["residual"]) != len(reducer.residual):
            raise OptionError(f"the checkpoint's residual has {len(record['residual'])} elements; these parameters "
                              f"have {len(reducer.residual)}")
    own = [r for r in records if (r["rank"], r["size"]) == (rank, size)]
    own += [r for r in records if r["process"] == _PROCESS and len(records) == 1]
    reducer.algorithm.forget()
    reducer.algorithm.step = max([r["algorithm"]["step"] for r in records], default=0)
    reducer.residual.zero_()
    reducer.residual_scale = records[0]["residual_scale"] if records else None
    if own:
        reducer.residual.copy_(own[0]["residual"])
        if own[0]["size"] == size:
            reducer.algorithm.load_state(own[0]["algorithm"])
    elif records:
        _redistribute(reducer, records, rank, size)


def _redistribute(reducer: Reducer, records: list[dict[str, Any]], rank: int, size: int) -> None:
    """Each rank takes the residuals of the former ranks that are equal to it modulo P."""
    former = records[0]["size"]
    for record in records:
        if record["rank"] % size == rank and former != size:
            reducer.residual.add_(record["residual"].to(reducer.residual.device))
    missing = sorted(set(range(former)) - {r["rank"] for r in records})
    if missing:
        warnings.warn(f"the checkpoint holds no residual of the former ranks {missing}: what they had not sent yet "
                      "is lost. Save with horovod_oktopk.torch.gather_state_dict to keep all", stacklevel=2)
    else:
        warnings.warn(f"the checkpoint is of {former} ranks, this job has {size}: the sum of the residuals is kept, "
                      "their distribution is not, so the bits will differ", stacklevel=2)
