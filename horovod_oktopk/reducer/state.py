"""The residual and the counters as records, one for each rank: what checkpoints and elastic jobs keep.

A record holds `residual` (NumPy, shape (n,)) and, in plain numbers, strings and lists: `rank`, `size`,
`process`, `residual_scale`, and the `algorithm`'s own state.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import OptionError
from ..vectors.sparse import Values
from .layout import Layout

Record = dict[str, Any]
Read = Callable[[Record], Values]

THIS_PROCESS = uuid.uuid4().hex


def record(rank: int, size: int, residual: Values, residual_scale: float | None, algorithm: dict[str, Any]) -> Record:
    """One rank's state."""
    return {"rank": rank, "size": size, "process": THIS_PROCESS, "residual": residual,
            "residual_scale": residual_scale, "algorithm": algorithm}


def share_of(records: Sequence[Record], rank: int, size: int, layout: Layout,
             read: Read = lambda r: r["residual"], process: str | None = None) -> Record:  # type: ignore[no-any-return]
    """What a rank takes of the records: its own; or, of another number of ranks, those equal to it modulo P.

    read: gives a record's residual. process: the rank's; a lone record of the same process is its own, whatever
    its rank was, as elastic training renumbers ranks. The algorithm's state is whole only for the same rank.
    Raises OptionError where a record is of another model.
    """
    step = max([r["algorithm"]["step"] for r in records], default=0)
    scale = records[0]["residual_scale"] if records else None
    own = [r for r in records if (r["rank"], r["size"]) == (rank, size)]
    own += [r for r in records if r["process"] == process and len(records) == 1]
    if own:
        algorithm = own[0]["algorithm"] if own[0]["size"] == size else {"step": step}
        return record(rank, size, _checked(read(own[0]), layout), scale, algorithm)
    residual = np.zeros(layout.n, layout.dtype)
    for r in records:
        if r["rank"] % size == rank and r["size"] != size:
            np.add(residual, _checked(read(r), layout), out=residual)
    if records:
        _warn(records, size)
    return record(rank, size, residual, scale, {"step": step})


def _checked(residual: Values, layout: Layout) -> Values:
    if len(residual) != layout.n:
        raise OptionError(f"the checkpoint's residual has {len(residual)} elements; these parameters "
                          f"have {layout.n}")
    return residual


def _warn(records: Sequence[Record], size: int) -> None:
    former = records[0]["size"]
    missing = sorted(set(range(former)) - {r["rank"] for r in records})
    if missing:
        warnings.warn(f"the checkpoint holds no residual of the former ranks {missing}: what they had not sent yet "
                      "is lost. Save with gather_state_dict or save_state to keep all",
                      stacklevel=2)
    else:
        warnings.warn(f"the checkpoint is of {former} ranks, this job has {size}: the sum of the residuals is kept, "
                      "their distribution is not, so the bits will differ", stacklevel=2)
