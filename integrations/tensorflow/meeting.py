"""Before a callback communicates: whether all ranks do. A rank with more batches would wait in a step, and the others
in the callback, for ever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd

from horovod_oktopk.errors import AgreementError
from horovod_oktopk.partial.reducer import PartialReducer
from horovod_oktopk.phases.agreement import instead
from horovod_oktopk.tensorflow.registry import reducers_of


def meet(target: Any, doing: str) -> None:
    """Tells the other ranks that this one takes no step now; on all ranks together. doing: "average metrics", say.

    Raises AgreementError, on all ranks, where some take a step or do something else. With `Partial` ranks may take
    different numbers of steps, and meet in `synchronize_replicas`.
    """
    reductions = [reducer.flat for reducer in reducers_of(target)]
    for each in sorted(reductions, key=lambda one: one.ranks.channel):  # as they first stepped
        if each.ranks.takes_part and not isinstance(each, PartialReducer):
            each.connect()
            each.check_agreement(instead(each.description, doing))
            each.leave()


def check_alike(what: str, names: Iterable[str]) -> None:
    """Raises AgreementError, on all ranks, where these are not the same; on all ranks together."""
    theirs = hvd.allgather_object(list(names), name="horovod_oktopk.alike")
    if any(each != theirs[0] for each in theirs):
        found = "; ".join(f"rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(theirs))
        raise AgreementError(f"the ranks have different {what} ({found}): compile and fit the model alike on all "
                             "ranks")
