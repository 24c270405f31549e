"""The residual and the counters as records, one for each rank: what checkpoints and elastic jobs keep.

A record holds `residual` (NumPy, shape (n,)) and, in plain numbers, strings and lists: `rank`, `size`, `process`,
`parameters` (name and shape of each, in the residual's order), `residual_scale`, `unit`, `copies`, and the
`algorithm`'s own state.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from ..errors import OptionError
from ..vectors.sparse import Values
from .layout import Layout

Record = dict[str, Any]
Read = Callable[[Record], Values]

FIELDS = {"unit", "rank", "size", "process", "parameters", "residual", "residual_scale", "algorithm", "copies"}
"""Of every record; what others it has is the same on all ranks."""
Unit = Literal["gradients", "parameters"]

THIS_PROCESS = uuid.uuid4().hex


def record(rank: int, size: int, layout: Layout, residual: Values, residual_scale: float | None,
           algorithm: dict[str, Any], unit: Unit = "gradients", copies: int = 1) -> Record:
    """One rank's state. unit: what the residual is measured in. copies: how many ranks, one after the other, have it.
    """
    return {"unit": unit, "rank": rank, "size": size, "process": THIS_PROCESS, "parameters": parameters_of(layout),
            "residual": residual, "residual_scale": residual_scale, "algorithm": algorithm, "copies": copies}


def parameters_of(layout: Layout) -> list[list[Any]]:
    """Name and shape of each, as a record has them."""
    return [[name, list(shape)] for name, shape, _ in layout.entries]


def share_of(records: Sequence[Record], rank: int, size: int, layout: Layout,
             read: Read = lambda r: r["residual"], process: str | None = None,  # type: ignore[no-any-return]
             unit: Unit = "gradients", copies: int = 1, adds: bool = True) -> Record:
    """What a rank takes of the records: its own; or, of another number of ranks, those equal to it modulo P.

    read: gives a record's residual. process: the rank's; a lone record of the same process is its own, whatever
    its rank was, as elastic training renumbers ranks. The algorithm's state is whole only for the same rank.
    copies: how many ranks, one after the other, are to have the same residual; where so many had, any of theirs will
    do. adds: whether residuals are added up over workers, and not averaged over ranks: then, where another number of
    ranks had it, each gets its part.
    Raises OptionError where a record is of another model.
    """
    if any(r["unit"] != unit for r in records):
        warnings.warn(f"the checkpoint's residual is in units of {records[0]['unit']}, this optimizer's of {unit}, "
                      "as only one of the two was made with StepAhead: it is dropped", stacklevel=2)
        records = []
    step = max([r["algorithm"]["step"] for r in records], default=0)
    scale = records[0]["residual_scale"] if records else None
    extra = {name: value for name, value in (records[0] if records else {}).items() if name not in FIELDS}
    own = [r for r in records if (r["rank"], r["size"]) == (rank, size)]
    own += [r for r in records if r["process"] == process and len(records) == 1]
    own += [r for r in records if r["size"] == size and r.get("copies", 1) == copies > 1
            and r["rank"] // copies == rank // copies]
    if own:
        places = match_parameters(own[0], layout)
        had = own[0].get("copies", 1)
        is_whole = (own[0]["size"] == size and had == copies and places == sorted(places)  # whatever the names are
                    and (copies == 1 or own[0]["rank"] == rank))
        algorithm, residual = own[0]["algorithm"] if is_whole else {"step": step}, fitted(own[0], places, read)
        if had != copies:
            residual, copies = residual / residual.dtype.type(had if adds else 1), 1
        return {**record(rank, size, layout, residual, scale, algorithm, unit, copies), **extra}
    residual = np.zeros(layout.n, layout.dtype)
    for r in records:
        if r["rank"] % size == rank and r["size"] != size:
            part = fitted(r, match_parameters(r, layout), read)
            np.add(residual, part / part.dtype.type(r.get("copies", 1) if adds else 1), out=residual)
    if records:
        _warn(records, size)
    return {**record(rank, size, layout, residual, scale, {"step": step}, unit), **extra}


def fitted(saved: Record, places: list[int], read: Read) -> Values:
    """A record's residual in the order of what `match_parameters` has found."""
    residual = read(saved)
    if places == sorted(places):
        return residual
    lengths = [int(np.prod(shape, dtype=np.int64)) for _, shape in saved["parameters"]]
    parts = np.split(residual, np.cumsum(lengths)[:-1])
    return np.concatenate([parts[place] for place in places])


def match_parameters(saved: Record, layout: Layout) -> list[int]:
    """For each gradient of the layout its place in the record: by name; or by order, if names are others, and those
    that both have are at the same places.

    Warns where names are in another order, or are others. Raises OptionError where it is of other parameters.
    """
    theirs, ours = saved["parameters"], parameters_of(layout)
    if theirs == ours:
        return list(range(len(ours)))
    place_of = {name: place for place, (name, _) in enumerate(theirs)}
    if len(place_of) == len(theirs) and sorted(theirs) == sorted(ours):
        warnings.warn("the checkpoint has the parameters in another order: residuals were matched by name, but the "
                      "bits of the next steps may differ", stacklevel=2)
        return [place_of[name] for name, _ in ours]
    shapes_agree = [shape for _, shape in theirs] == [shape for _, shape in ours]
    if shapes_agree and all(place_of.get(name, place) == place for place, (name, _) in enumerate(ours)):
        warnings.warn("the checkpoint has other names for the parameters, with the same shapes: residuals were "
                      f"matched by their order, {_difference(theirs, ours)}", stacklevel=2)
        return list(range(len(ours)))
    raise OptionError(f"the checkpoint's residual is of other parameters ({_length(theirs)} elements; these "
                      f"have {layout.n}): {_difference(theirs, ours)}")


def _length(parameters: Sequence[Sequence[Any]]) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) for _, shape in parameters)


def _difference(theirs: Sequence[Sequence[Any]], ours: Sequence[Sequence[Any]]) -> str:
    came, expected = next((a, b) for a, b in zip_longest(theirs, ours, fillvalue=["nothing", []]) if a != b)
    return f"it has '{came[0]}' {tuple(came[1])} where this model has '{expected[0]}' {tuple(expected[1])}"


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
