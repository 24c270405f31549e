"""The state of one optimizer's exchange as records, one for each rank, for checkpoints and elastic jobs.

A record holds `residual` (NumPy, shape (n,), or a function that reads it from a file) and, in plain numbers, strings
and lists: `rank`, `size`, `process`, `parameters` (name and shape of each, in the residual's order),
`coefficient`, `unit`, `copies`, the `level` of a density that is measured, and the `algorithm`'s own state. Those of
StepAhead have more: OF_ONE_RANK in `modes/step_ahead/mode.py`.
"""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, get_args

import numpy as np

from ..errors import OptionError, PluginError
from ..schemes.algorithm import Memory
from ..schemes.options import Unit
from ..transport.ranks import Ranks
from ..vectors.layout import Layout
from ..vectors.sparse import Values

Record = dict[str, Any]

THIS_PROCESS = uuid.uuid4().hex
NEEDS_ALL_RANKS = ("StepAhead with hierarchical=True needs all ranks of the job: give the number of ranks of a host "
                   "instead, or no process set")


def parameters_of(layout: Layout) -> list[list[Any]]:
    """Return name and shape of each parameter, as in a record."""
    return [[name, list(shape)] for name, shape, _ in layout.entries]


def check_records(records: Any) -> None:
    """Raise OptionError if the argument is no list of records, or one lacks a field, or has a wrong one.

    Residuals are checked when they are taken; see `residual_of`.
    """
    if not isinstance(records, list | tuple):
        raise OptionError(f"the state is damaged: expected a list of records; got {type(records).__name__}")
    for each in records:
        if not isinstance(each, dict):
            raise OptionError(f"the state is damaged: expected a record; got {type(each).__name__}")
        for name, is_right in {**_FORM, **_FORM_OF_SOME}.items():
            if name not in each and name in _FORM:
                raise OptionError(f"the state is damaged: a record has no '{name}'; load another one")
            if name in each and not is_right(each[name]):
                raise OptionError(f"the state is damaged: a record's '{name}' is {each[name]!r:.80}; "
                                  "load another one")
        Memory.from_record(each["algorithm"])  # of all ranks: or one would refuse it when the others wait for it


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number_of_ranks(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.floating) and bool(-math.inf < value < math.inf)


def _are_parameters(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[0], str)
        and isinstance(each[1], list | tuple) and all(map(_is_count, each[1])) for each in value)


_FORM: dict[str, Callable[[Any], bool]] = {
    "unit": lambda value: value in get_args(Unit), "rank": _is_count, "size": _is_number_of_ranks,
    "process": lambda value: isinstance(value, str), "parameters": _are_parameters, "residual": lambda _: True,
    "coefficient": lambda value: value is None or (_is_number(value) and value > 0),
    "level": _is_count,
    "algorithm": lambda value: isinstance(value, dict) and _is_count(value.get("step"))}
"""Check for each field of a record."""
_FORM_OF_SOME: dict[str, Callable[[Any], bool]] = {
    "copies": _is_number_of_ranks, "steps": _is_count,
    "noise": lambda value: value is None or (isinstance(value, dict) and all(map(_is_number, value.values())))}


def residual_of(saved: Record, dtype: Any) -> Values:
    """Return a record's residual in the given dtype: float32 or float64, shape (n,).

    Raise OptionError if the residual does not fit the record's parameters, or is not finite.
    """
    values, length = saved["residual"], _length(saved["parameters"])
    if callable(values):
        values = values()
    is_array = isinstance(values, np.ndarray)
    if not is_array or values.shape != (length,) or values.dtype not in (np.float32, np.float64):
        came = f"{values.dtype} of shape {values.shape}" if is_array else type(values).__name__
        raise OptionError(f"the state is damaged: the residual of rank {saved['rank']} must be float32 or float64 "
                          f"of shape {(length,)}; got {came}")
    with np.errstate(over="ignore"):
        residual: Values = values.astype(dtype, copy=False)
    if not np.isfinite(residual).all():
        raise OptionError(f"the residual of rank {saved['rank']} is not finite in {np.dtype(dtype).name}: the state "
                          "is damaged, or of a model with a wider dtype: load another one, or convert the model")
    return residual


def fitted(saved: Record, layout: Layout) -> tuple[Values, bool]:
    """Return a record's residual in the layout's dtype and order; and True if that is the record's order, too.

    Match parameters by name; or by order, if names are others, and those that both have are at the same places.
    Warn if names are in another order, or are others, or if one has fewer than the other, as some were frozen.
    Raise OptionError if the record is of other parameters.
    """
    theirs, ours = saved["parameters"], parameters_of(layout)
    place_of = {name: place for place, (name, _) in enumerate(theirs)}
    is_resized = has_more_or_fewer(saved, layout)
    is_in_order = not is_resized and (
        theirs == ours or len(place_of) < len(theirs) or sorted(theirs) != sorted(ours))
    if is_resized:
        warnings.warn("the checkpoint has a residual of other parameters than are trained now, as some were frozen "
                      f"or thawed since: {_difference(theirs, ours)}. Those that both have keep theirs; load another "
                      "one if that is wrong", stacklevel=2)
    elif not is_in_order:
        warnings.warn("the checkpoint has the parameters in another order: residuals were matched by name, but the "
                      "bits of the next steps may differ. Build the model as before to prevent that", stacklevel=2)
    elif theirs != ours:
        shapes_agree = [shape for _, shape in theirs] == [shape for _, shape in ours]
        if not shapes_agree or any(place_of.get(name, place) != place for place, (name, _) in enumerate(ours)):
            raise OptionError(f"the checkpoint's residual is of other parameters ({_length(theirs)} elements; these "
                              f"have {layout.n}): {_difference(theirs, ours)}. Load one of this model")
        warnings.warn("the checkpoint has other names for the parameters, with the same shapes: residuals were "
                      "matched by their order, which in PyTorch is the alphabetical one of the names. Load another "
                      f"one if that is wrong: {_difference(theirs, ours)}", stacklevel=2)
    if is_in_order:
        return residual_of(saved, layout.dtype), True
    return extended(saved, [name for name, _ in theirs], layout)["residual"], False


def has_more_or_fewer(record: Record, layout: Layout) -> bool:
    """Return True if a record has all parameters of a layout and more of them, or has some of them alone."""
    theirs, ours = ({(name, tuple(shape)) for name, shape in each}
                    for each in (record["parameters"], parameters_of(layout)))
    names = {name for name, _ in theirs | ours}
    return bool(theirs & ours) and (theirs < ours or ours < theirs) and len(names) == len(theirs | ours)


def extended(record: Record, names: Sequence[str | None], layout: Layout) -> Record:
    """Return a record of other parameters as one of a layout, in which they have these names; None is of one gone.

    What the record lacks has no residual.
    """
    lengths = [_length([each]) for each in record["parameters"]]
    parts = np.split(residual_of(record, layout.dtype), np.cumsum(lengths))[:-1]
    known = dict(zip(names, parts, strict=True))
    residual = [known.get(name, np.zeros(_length([[name, shape]]), layout.dtype))
                for name, shape in parameters_of(layout)]
    return {**record, "parameters": parameters_of(layout), "residual": np.concatenate(residual), "shared": None,
            "algorithm": {"step": record["algorithm"]["step"]}}


def _length(parameters: Sequence[Sequence[Any]]) -> int:
    return sum(math.prod(shape) for _, shape in parameters)


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
        warnings.warn(f"the checkpoint is of {former} ranks, this job has {size}: what they had not sent still moves "
                      f"the model as far, but other ranks have it. Start {former} ranks to get the same bits",
                      stacklevel=2)


@dataclass(frozen=True)
class Residuals:
    """The residuals of one exchange: of which elements they are, in which unit, and what the ranks' are together.

    If `adds`, workers' residuals are added up; otherwise they are averaged over the ranks. `hierarchical` is that of
    the options if the ranks of a host have one residual.
    """

    layout: Layout
    ranks: Ranks
    unit: Unit = "gradients"
    adds: bool = True
    hierarchical: bool | int = False

    @property
    def copies(self) -> int:
        """Number of consecutive ranks that have the same residual. Raise PluginError if a host's is not known."""
        if not self.hierarchical or self.ranks.membership().size == 1:
            return 1
        copies = self.ranks.host()[1] if self.hierarchical is True else int(self.hierarchical)
        if copies is None:
            raise PluginError(NEEDS_ALL_RANKS)
        return copies

    def record_of(self, residual: Values, algorithm: dict[str, Any], coefficient: float | None = None,
                  copies: int = 1, level: int = 0) -> Record:
        """Return a record of this rank, whose residual is that of `copies` consecutive ranks."""
        rank, size, _ = self.ranks.membership()
        return {"unit": self.unit, "rank": rank, "size": size, "process": THIS_PROCESS, "copies": copies,
                "parameters": parameters_of(self.layout), "residual": residual, "coefficient": coefficient,
                "algorithm": algorithm, "level": level}

    def part_of(self, records: Sequence[Record], rank: int, size: int, process: str | None = None) -> Record:
        """Return what a rank takes of the records.

        1. The record of the same rank and P; its algorithm's state is whole for no other.
        2. A lone record of the rank's process, whatever its rank was, as elastic training renumbers ranks.
        3. The record of a rank that had the same residual, as ranks of a host have.
        4. Else its part of the records of another number of ranks, see `_weight`.

        If residuals are added up, and another number of ranks had the same, each gets its part.
        Raise OptionError if a record is of another model, or damaged.
        """
        if any(r["unit"] != self.unit for r in records):
            warnings.warn(f"the checkpoint's residual is in units of {records[0]['unit']}, this optimizer's of "
                          f"{self.unit}, as only one of the two was made with StepAhead: it is dropped. Use the same "
                          "mode to keep it", stacklevel=2)
            records = []
        first = records[0] if records else {}
        algorithm = {"step": max([r["algorithm"]["step"] for r in records], default=0)}
        layout, copies = self.layout, self.copies
        own = [r for r in records if (r["rank"], r["size"]) == (rank, size)]
        own += [r for r in records if r["process"] == process and len(records) == 1]
        own += [r for r in records if r["size"] == size and r.get("copies", 1) == copies > 1
                and r["rank"] // copies == rank // copies]
        if own:
            residual, is_in_order = fitted(own[0], layout)
            copies_then = own[0].get("copies", 1)
            is_same = own[0]["size"] == size and copies_then == copies and (copies == 1 or own[0]["rank"] == rank)
            if is_same and is_in_order:
                algorithm = own[0]["algorithm"]
            if copies_then != copies:
                residual, copies = residual / residual.dtype.type(copies_then if self.adds else 1), 1
        else:
            residual, copies = np.zeros(layout.n, layout.dtype), 1
            for r in records:
                if weight := self._weight(r, rank, size):
                    part, _ = fitted(r, layout)
                    np.add(residual, part * part.dtype.type(weight), out=residual)
            if records:
                _warn(records, size)
        own_fields = self.record_of(residual, algorithm, first.get("coefficient"), copies, first.get("level", 0))
        if "shared" in first and has_more_or_fewer(first, layout):
            own_fields["shared"] = None  # which tells other parameters
        return {**first, **own_fields, "rank": rank, "size": size}  # any other field is the same on all ranks

    def _weight(self, record: Record, rank: int, size: int) -> float:
        """Return the factor with which a rank takes the residual of one of another number of ranks; mostly 0.

        The sum over the ranks stays, or the mean, so that what was not sent moves the model as far. For a mean, more
        ranks than before share the records.
        """
        former: int = record["size"]
        places = size if self.adds else min(former, size)
        if former == size or record["rank"] % places != rank % places:
            return 0.0
        if self.adds:
            return 1 / int(record.get("copies", 1))
        return size / former / len(range(rank % places, size, places))
