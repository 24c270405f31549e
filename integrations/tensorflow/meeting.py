"""A meeting of all ranks before a callback communicates.

A rank with more batches would wait in a step, and the others in the callback, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd

from horovod_oktopk.errors import AgreementError
from horovod_oktopk.tensorflow.registry import each_run_of


def meet(target: Any, doing: str) -> None:
    """Tell the other ranks that this one takes no step now. Collective. doing: "average metrics", say.

    Raise AgreementError, on all ranks, if some take a step or do something else. With `Partial` ranks may take
    different numbers of steps, and meet in `synchronize_replicas`.
    """
    modes = [run.mode for run in each_run_of(target)]
    for mode in sorted(modes, key=lambda each: each.ranks.channel):  # as they first stepped
        if mode.ranks.takes_part:
            mode.meet(doing)
            mode.leave()


def check_alike(what: str, names: Iterable[str]) -> None:
    """Raise AgreementError, on all ranks, if these are not the same. Collective."""
    theirs = hvd.allgather_object(list(names), name="horovod_oktopk.alike")
    if any(each != theirs[0] for each in theirs):
        found = "; ".join(f"rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(theirs))
        raise AgreementError(f"the ranks have different {what} ({found}): compile and fit the model alike on all "
                             "ranks")
