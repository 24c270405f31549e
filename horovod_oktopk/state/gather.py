"""All ranks' records in one file, which the first rank writes and reads: the others need not see its disk.

Residuals travel one at a time, so no rank holds more than one beside its own. Any failure on one rank is told to
all between two messages: then nothing is under way, and training can go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError
from ..phases.agreement import instead
from ..transport.base import CHUNK, Transport
from ..vectors.sparse import Layout, Values
from .archive import Reader, Writer
from .records import Record, Stateful, parameters_of, share_of, warn_of_no_state
from .together import gather_texts, tell, together

PathLike = str | os.PathLike[str]


def save(modes: Sequence[Stateful], path: PathLike, optimizers: Sequence[int] = (), **marks: Any) -> None:
    """Write the state of all ranks' modes. Collective.

    optimizers: the number of each mode's optimizer; if not given, one has them all. marks: plain values,
    to be stored beside the state. The file appears whole or not at all.
    Raise the same error on all ranks if one cannot do its part: OSError if the file cannot be written,
    OptionError if marks are not plain values. Then nothing is left behind, and training may go on.
    """
    saving = _Saving(Path(path), writes=all(mode.ranks.membership()[0] == 0 for mode in modes))
    try:
        records = [saving.add(mode, index) for index, mode in enumerate(modes)]
        content = {"marks": marks, "optimizers": list(optimizers) or [0] * len(records), "reductions": records}
        saving.finish(modes[0].connect(), content)
    finally:
        saving.discard()
        for mode in modes:
            mode.leave()


def records(mode: Stateful, doing: str) -> list[Record]:
    """Return the records of all ranks on rank 0, by rank; on other ranks this rank's own. Collective.

    doing: in words, for the ranks that do something else.
    """
    try:
        everyone = [{**record, "residual": None if residual is None else residual.copy()}
                    for record, residual in _records_and_residuals(mode, doing, doing, _nothing)]
    finally:
        mode.leave()
    return [record for record in everyone if record["residual"] is not None]


def read_marks(path: PathLike) -> dict[str, Any]:
    """Return the plain values that were stored beside the state. Raise OptionError if the file cannot be read."""
    reader = Reader(path)
    reader.close()
    return reader.marks


def load(mode: Stateful, index: int, path: PathLike, optimizer: int = 0, taken: set[int] | None = None) -> None:
    """Give every rank its share of the state of an optimizer's mode. Collective.

    The state is that of the same parameters, or else the index-th. taken: the states that other modes have taken,
    to which this one is added. If the file has no other, the mode stays as it is, with a warning.
    Raise OptionError on every rank if the first one cannot read the file, or if it is of another model. Then no rank
    has taken anything.
    """
    transport = mode.connect()
    mode.check_agreement(instead(mode.description, "load the state from a file"))  # or some would wait in vain
    doing = f"load the state from {path}"
    source, is_first = _Source(mode, path), transport.rank == 0
    find = partial(source.open, index, optimizer, set() if taken is None else taken)
    try:
        together(transport, doing, find if is_first else _nothing)
        if tell(transport, source.has_state):
            share = _shares(transport, mode, source if is_first else None, doing)
            together(transport, doing, partial(mode.take, share))
    finally:
        source.close()


def _shares(transport: Transport, mode: Stateful, source: _Source | None, doing: str) -> Record:
    """Return this rank's share. Collective.

    source: on rank 0, which reads its own share last, to hold no more than one beside it.
    """
    inbox = together(transport, doing, partial(_inbox, mode, needed=source is None))
    mine: Record = {}
    for rank in (*range(1, transport.size), 0):
        share = together(transport, doing, partial(source.share, rank, transport.size) if source else _nothing)
        plain = tell(transport, share and {**share, "residual": None})
        residual = _move(transport, 0, rank, share["residual"] if share else None, inbox, mode.layout)
        if transport.rank == rank:
            mine = {**plain, "residual": residual}
    return mine


def _records_and_residuals(mode: Stateful, doing: str, said: str, prepare: Callable[[], None],
          ) -> Iterator[tuple[Record, Values | None]]:
    """Yield the plain record of each rank, by rank, and its residual on rank 0, or on the rank itself. Collective.

    A residual is valid until the next. said: in words, for ranks that do something else, and would wait in vain.
    prepare: is called on each rank before anything is sent.
    """
    def begin() -> tuple[Record | None, Values | None]:
        prepare()
        return mode.record(), _inbox(mode, transport.rank == 0)

    transport = mode.connect()
    mode.check_agreement(instead(mode.description, said))
    own, inbox = together(transport, doing, begin)
    assert own is not None
    for rank, text in enumerate(gather_texts(transport, json.dumps({**own, "residual": None}))):
        residual = own["residual"] if rank == transport.rank else None
        arrived = _move(transport, rank, 0, residual, inbox, mode.layout)
        yield json.loads(text), residual if arrived is None else arrived


class _Saving:
    """A file that is being saved. writes: True if this rank writes it."""

    def __init__(self, path: Path, writes: bool) -> None:
        self._path, self._writes = path, writes
        self._doing = f"save the state to {path}"
        self._writer: Writer | None = None

    def add(self, mode: Stateful, index: int) -> list[Record]:
        """Write the residuals of all ranks into the file; return their plain records. Collective."""
        records = []
        for record, residual in _records_and_residuals(mode, self._doing, "save the state to a file", self._open):
            record["residual"] = {"n": mode.layout.n, "file": f"{index}.{record['rank']}.npy"}
            together(mode.connect(), self._doing, partial(self._write, record["residual"]["file"], residual))
            records.append(record)
        return records

    def finish(self, transport: Transport, content: dict[str, Any]) -> None:
        """Put the file in its place. Collective."""
        together(transport, self._doing, partial(self._finish, content))

    def discard(self) -> None:
        """Remove the unfinished file."""
        if self._writer is not None:
            self._writer.discard()

    def _open(self) -> None:
        if self._writes and self._writer is None:
            self._writer = Writer(self._path)

    def _write(self, name: str, residual: Values | None) -> None:
        if self._writer is not None and residual is not None:
            self._writer.write(name, residual)

    def _finish(self, content: dict[str, Any]) -> None:
        if self._writer is not None:
            try:
                json.dumps(content)
            except (TypeError, ValueError) as error:
                raise OptionError("what is stored beside the state must be plain values (numbers, texts, lists): "
                                  f"{error}. Convert them first") from error
            self._writer.finish(content)


class _Source:
    """The file, on the rank that reads it. has_state: True if it has a state for the mode; None if it is not read."""

    def __init__(self, mode: Stateful, path: PathLike) -> None:
        self.has_state: bool | None = None
        self._mode, self._path = mode, path
        self._reader: Reader | None = None
        self._records: list[Record] = []

    def open(self, index: int, optimizer: int, taken: set[int]) -> None:
        """Open the file, and find the state; see `load`. Raise OptionError if the file cannot be read."""
        with self._explained():
            self._reader = Reader(self._path)
        own = [records for owner, records in zip(self._reader.owners, self._reader.reductions, strict=True)
               if owner == optimizer]
        place = _place([records[0]["parameters"] for records in own], index, taken, self._mode.layout)
        self.has_state = place is not None
        if place is None:
            warn_of_no_state(self._path, self._mode.layout)
        else:
            self._records = own[place]
            taken.add(place)

    def share(self, rank: int, size: int) -> Record:
        """Return a rank's share. Raise OptionError if the state is of another model, or damaged."""
        mode, reader = self._mode, self._reader
        assert reader is not None
        with self._explained():
            return share_of(self._records, rank, size, mode.layout, reader.residual, unit=mode.unit,
                            copies=mode.copies, adds=mode.adds)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._reader is not None:
            self._reader.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OptionError as error:
            words = f"no state for these parameters could be loaded from {self._path}: {error}"
            raise OptionError(words) from error


def _place(saved: Sequence[Any], index: int, taken: set[int], layout: Layout) -> int | None:
    """Return the place of the state of the same parameters, if there is one; otherwise match by order.

    saved: the parameters of each state.
    """
    ours, free = sorted(parameters_of(layout)), set(range(len(saved))) - taken
    same = [place for place in sorted(free) if sorted(saved[place]) == ours]
    if index in same or (not same and index in free):
        return index
    return same[0] if same else None


def _nothing() -> None:
    """Do nothing, on a rank that has nothing to do."""


def _inbox(mode: Stateful, needed: bool) -> Values | None:
    """Return the memory in which residuals arrive; None if it is not needed."""
    return np.empty(mode.layout.n, mode.layout.dtype) if needed else None


def _move(transport: Transport, source: int, destination: int, residual: Values | None, inbox: Values | None,
          layout: Layout) -> Values | None:
    """Move one rank's residual to another, and return it there, in the inbox; None elsewhere. Collective.

    residual: at the source; like the inbox of the layout's length and dtype.
    """
    if source == destination:
        return residual
    length = layout.n * layout.dtype.itemsize
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        outgoing = {destination: residual.view(np.uint8)[start:stop]} if residual is not None else {}
        incoming = {source: stop - start} if transport.rank == destination else {}
        for batch in transport.exchange(outgoing, incoming):
            for _, message in batch:
                assert inbox is not None
                inbox.view(np.uint8)[start:stop] = message
    return inbox if transport.rank == destination else None
