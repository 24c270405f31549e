"""All ranks' records in one file, which the first rank writes and reads: the others need not see its disk.

The file is a zip archive of `records.json` and one .npy for each residual. Residuals travel one at a
time, so no rank holds more than one beside its own.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import OptionError
from ..phases.agreement import instead
from ..transport.base import Transport
from ..transport.connect import Network
from ..transport.counting import CountingTransport
from ..vectors.sparse import Values
from .layout import Layout
from .state import Record, Unit, match_parameters, share_of

PathLike = str | os.PathLike[str]
CHUNK = 1 << 28
"""Bytes in one message: MPI counts in 32 bits."""


class Reduction(Protocol):
    """What has a state on every rank: a FlatReducer, or a StepAheadReducer."""

    network: Network
    unit: Unit

    @property
    def layout(self) -> Layout: ...

    @property
    def description(self) -> str: ...

    @property
    def copies(self) -> int:
        """How many ranks, one after the other, have the same residual."""

    @property
    def adds(self) -> bool:
        """Whether workers' residuals are added up; otherwise they are averaged over the ranks."""

    def connect(self) -> CountingTransport: ...

    def check_agreement(self, description: str) -> bool: ...

    def leave(self) -> None: ...

    def record(self) -> Record | None: ...

    def take(self, share: Record) -> None: ...


def save(reducers: Sequence[Reduction], path: PathLike, optimizers: Sequence[int] = (), **marks: Any) -> None:
    """Writes the state of all ranks' reducers; called on all ranks together.

    optimizers: which optimizer each reducer is of, by number; if not given, one has them all. marks: plain values,
    to be stored beside it. The file appears whole or not at all.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    writes = all(reducer.network.membership()[0] == 0 for reducer in reducers)
    archive = zipfile.ZipFile(part, "w") if writes else None
    records = [_save_one(reducer, index, archive) for index, reducer in enumerate(reducers)]
    if archive is not None:
        owners = list(optimizers) or [0] * len(records)
        archive.writestr("records.json", json.dumps({"marks": marks, "optimizers": owners, "reductions": records}))
        archive.close()
        part.replace(path)
    for reducer in reducers:
        reducer.leave()


def read_marks(path: PathLike) -> dict[str, Any]:
    """The plain values that were stored beside the state."""
    with zipfile.ZipFile(path) as archive:
        marks: dict[str, Any] = json.loads(archive.read("records.json"))["marks"]
    return marks


def load(reducer: Reduction, index: int, path: PathLike, optimizer: int = 0) -> None:
    """Gives every rank its share of the state of an optimizer's index-th reducer; called on all ranks together.

    Raises OptionError on every rank where the first one cannot read it, or where it is of another model.
    """
    transport = reducer.connect()
    reducer.check_agreement(instead(reducer.description, "load the state from a file"))  # or some would wait in vain
    source = _Source(reducer, index, path, optimizer) if transport.rank == 0 else None
    failure = _tell(transport, source and source.failure)
    if failure is not None:
        raise OptionError(f"no state for these parameters could be loaded from {path}: {failure}")
    for rank in range(transport.size):
        share = source.share(rank, transport.size) if source is not None else None
        plain = _tell(transport, share and {**share, "residual": None})
        residual = _move(transport, 0, rank, None if share is None else share["residual"], reducer)
        if transport.rank == rank:
            reducer.take({**plain, "residual": residual})


class _Source:
    """The file, on the rank that reads it. failure: why it cannot be; None where it can."""

    def __init__(self, reducer: Reduction, index: int, path: PathLike, optimizer: int) -> None:
        self.failure: str | None = None
        self._layout, self._unit, self._copies = reducer.layout, reducer.unit, reducer.copies
        self._adds = reducer.adds
        try:
            self._archive = zipfile.ZipFile(path)
            saved = json.loads(self._archive.read("records.json"))
            own = [records for owner, records in zip(saved["optimizers"], saved["reductions"], strict=True)
                   if owner == optimizer]
            self._records: list[Record] = own[index]
            for record in self._records:
                match_parameters(record, reducer.layout)
        except OptionError as error:
            self.failure = str(error)
        except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
            self.failure = f"{type(error).__name__}: {error}"

    def share(self, rank: int, size: int) -> Record:
        return share_of(self._records, rank, size, self._layout, self._read, unit=self._unit, copies=self._copies,
                        adds=self._adds)

    def _read(self, record: Record) -> Values:
        with self._archive.open(record["residual"]["file"]) as file:
            values: Values = np.lib.format.read_array(file)  # type: ignore[no-untyped-call]
        return values


def _save_one(reducer: Reduction, index: int, archive: zipfile.ZipFile | None) -> list[Record]:
    """All ranks' plain records; their residuals go into the archive."""
    transport = reducer.connect()
    reducer.check_agreement(instead(reducer.description, "save the state to a file"))  # or some would wait in vain
    own = reducer.record()
    assert own is not None
    plain = {**own, "residual": {"n": reducer.layout.n, "file": f"{index}.{transport.rank}.npy"}}
    records: list[Record] = [json.loads(text) for text in _gather(transport, json.dumps(plain))]
    for rank, record in enumerate(records):
        residual = _move(transport, rank, 0, own["residual"] if rank == transport.rank else None, reducer)
        if archive is not None and residual is not None:
            with archive.open(record["residual"]["file"], "w", force_zip64=True) as file:
                np.lib.format.write_array(file, residual)  # type: ignore[no-untyped-call]
    return records


def _gather(transport: Transport, text: str) -> list[str]:
    message = np.frombuffer(text.encode(), np.uint8)
    sizes = transport.allgather(np.array([len(message)], np.int64))[:, 0]
    return [bytes(part).decode() for part in transport.allgatherv(message, sizes)]


def _tell(transport: Transport, value: Any) -> Any:
    """What rank 0 has to say, as plain values."""
    return json.loads(_gather(transport, json.dumps(value) if transport.rank == 0 else "")[0])


def _move(transport: Transport, source: int, destination: int, residual: Values | None,
          reducer: Reduction) -> Values | None:
    """One rank's residual at another; all ranks take part. None elsewhere."""
    if source == destination:
        return residual
    moved = np.empty(reducer.layout.n, reducer.layout.dtype) if transport.rank == destination else None
    length = reducer.layout.n * reducer.layout.dtype.itemsize
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        outgoing = ({destination: residual.view(np.uint8)[start:stop]}
                    if transport.rank == source and residual is not None else {})
        incoming = {source: stop - start} if moved is not None else {}
        for batch in transport.exchange(outgoing, incoming, 1):
            for _, message in batch:
                assert moved is not None
                moved.view(np.uint8)[start:stop] = message
    return moved
