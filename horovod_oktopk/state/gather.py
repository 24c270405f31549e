"""All ranks' records in one file, which the first rank writes and reads: the others need not see its disk.

Residuals travel one at a time, so no rank holds more than one beside its own. Any failure on one rank is told to
all between two messages: then nothing is under way, and training can go on.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import OptionError, PluginError, TransportError
from ..transport.base import CHUNK, WORD, Bytes, Transport
from ..transport.counting import CountingTransport
from ..vectors.sparse import Values
from .archive import PathLike, Reader, Writer
from .records import Record, Residuals, parameters_of

NOTHING_YET = "there is no state to save: this rank has taken no step yet, save after the first one"
RAISED = {"OptionError": OptionError, "PluginError": PluginError, "OSError": OSError}


class Stateful(Protocol):
    """The state of one optimizer's exchange on this rank: a mode, which says what these do."""

    residuals: Residuals

    def meeting(self, doing: str) -> AbstractContextManager[CountingTransport]: ...

    def records(self) -> list[Record]: ...

    def restore(self, record: Record) -> None: ...


def save(modes: Sequence[Stateful], path: PathLike, optimizers: Sequence[int] = (), **marks: Any) -> None:
    """Write the state of all ranks' modes. Collective.

    `optimizers` holds the number of each mode's optimizer; if not given, one has them all. The marks are plain values
    to be stored beside the state. The file appears whole or not at all.
    Raise the same error on all ranks if one cannot do its part: OSError if the file cannot be written,
    OptionError if marks are not plain values. Then nothing is left behind, and training may go on.
    """
    doing, writes = f"save the state to {path}", all(mode.residuals.ranks.membership()[0] == 0 for mode in modes)
    writer: Writer | None = None
    reductions: list[list[Record]] = [[] for _ in modes]
    try:
        with ExitStack() as stack:
            for index, mode in enumerate(modes):
                transport = stack.enter_context(mode.meeting("save the state to a file"))
                for found in _of_all_ranks(mode, transport, doing):
                    with _together(transport, doing):
                        if writes and found is not None:
                            writer = writer or Writer(Path(path))
                            file = f"{index}.{found['rank']}.npy"
                            writer.write(file, found["residual"])
                            plain = {"n": mode.residuals.layout.n, "file": file}
                            reductions[index].append({**found, "residual": plain})
            with _together(transport, doing):
                if writer:
                    writer.finish({"marks": marks, "optimizers": list(optimizers) or [0] * len(modes),
                                   "reductions": reductions})
    finally:
        if writer:
            writer.discard()


def records(mode: Stateful, doing: str) -> list[Record]:
    """Return the records of all ranks on rank 0, by rank; on other ranks this rank's own. Collective.

    Ranks that do something else are told in words what this is `doing`.
    """
    with mode.meeting(doing) as transport:
        return [{**found, "residual": found["residual"].copy()}
                for found in _of_all_ranks(mode, transport, doing) if found is not None]


def read_marks(path: PathLike) -> dict[str, Any]:
    """Return the plain values that were stored beside the state. Raise OptionError if the file cannot be read."""
    with closing(Reader(path)) as reader:
        return reader.marks


def load(mode: Stateful, index: int, path: PathLike, optimizer: int = 0, taken: set[int] | None = None) -> None:
    """Give every rank its part of the state of an optimizer's mode. Collective.

    The state is that of the same parameters, or else the index-th. It is added to `taken`, the states that other
    modes have taken. If the file has no other, the mode stays as it is, with a warning.
    Raise OptionError on every rank if the first one cannot read the file, or if it is of another model. Then no rank
    has taken anything.
    """
    doing, layout = f"load the state from {path}", mode.residuals.layout
    with mode.meeting("load the state from a file") as transport, ExitStack() as stack:
        reader, saved = None, None
        with _together(transport, doing), _naming(path):
            if transport.rank == 0:
                reader = stack.enter_context(closing(Reader(path)))
                saved = _find(reader, mode, index, optimizer, set() if taken is None else taken)
                if saved is None:
                    first = layout.entries[0][0] if layout.entries else "nothing"
                    warnings.warn(f"{path} has no state for the parameters that begin with '{first}': they had none "
                                  "when it was saved, and keep what they have", stacklevel=2)
        if not _tell(transport, saved is not None):
            return
        with _together(transport, doing):
            memory = np.empty(0 if reader else layout.n, layout.dtype)
        for rank in (*range(1, transport.size), 0):  # rank 0's last: it holds no more than one beside its own
            record: Record = {}
            with _together(transport, doing), _naming(path):
                if saved is not None:
                    record = mode.residuals.part_of(saved, rank, transport.size)
                    memory = record["residual"]
            plain = _tell(transport, {**record, "residual": None})
            _move(transport, 0, rank, memory)
            if transport.rank == rank:
                mine = {**plain, "residual": memory}
        with _together(transport, doing):
            mode.restore(mine)


def _of_all_ranks(mode: Stateful, transport: Transport, doing: str) -> Iterator[Record | None]:
    """Yield the record of each rank, by rank, on rank 0 and on the rank itself; None elsewhere. Collective.

    A residual is valid until the next. The rest of a record may be long, too: SameBlocks has n/8 bytes of turns.
    """
    with _together(transport, doing):
        own = next(iter(mode.records()), None)
        if own is None:
            raise PluginError(NOTHING_YET)
        residual: Values = own["residual"]
        memory = np.empty_like(residual) if transport.rank == 0 else residual
        text = json.dumps({**own, "residual": None}).encode()
        plain = np.frombuffer(text + b" " * (-len(text) % WORD), np.uint8)  # messages are whole words
    for rank, length in enumerate(transport.allgather(np.array([len(plain)], np.int64))[:, 0]):
        words = plain if rank == transport.rank else np.empty(length, np.uint8)
        _move(transport, rank, 0, words)
        _move(transport, rank, 0, memory)
        if rank == transport.rank:
            yield own
        else:
            yield {**json.loads(bytes(words)), "residual": memory} if transport.rank == 0 else None


def _find(reader: Reader, mode: Stateful, index: int, optimizer: int, taken: set[int]) -> list[Record] | None:
    """Return the records of the same parameters, if the file has some; otherwise match by order. See `load`."""
    saved = [records for owner, records in zip(reader.owners, reader.reductions, strict=True) if owner == optimizer]
    ours, free = sorted(parameters_of(mode.residuals.layout)), set(range(len(saved))) - taken
    same = [place for place in sorted(free) if sorted(saved[place][0]["parameters"]) == ours]
    if index in same or (not same and index in free):
        same = [index]
    if not same:
        return None
    taken.add(same[0])
    return saved[same[0]]


@contextmanager
def _naming(path: PathLike) -> Iterator[None]:
    try:
        yield
    except OptionError as error:
        raise OptionError(f"no state for these parameters could be loaded from {path}: {error}") from error


@contextmanager
def _together(transport: Transport, doing: str) -> Iterator[None]:
    """Run the block, which does not communicate, on this rank; go on once all ranks have succeeded. Collective.

    Otherwise the others would wait for its messages for ever, or confuse them with those of its next step.
    `doing` is in words that follow "could not".
    Raise the error of the first rank that has failed, with the same text on all ranks: an OptionError or PluginError
    as it is, an OSError with the same errno, and a PluginError for anything else.
    """
    failure, words = None, None
    try:
        yield
    except TransportError:
        raise  # there is nobody to be told
    except Exception as error:
        failure, words = error, _in_words(error, transport.rank, doing)
    told = next((each for each in _gather(transport, words) if each), None)
    if told is not None:
        raise RAISED[told[0]](*told[1:]) from failure


def _in_words(error: Exception, rank: int, doing: str) -> list[Any]:
    if isinstance(error, OptionError | PluginError):
        return ["OptionError" if isinstance(error, OptionError) else "PluginError", str(error)]
    words = f"rank {rank} could not {doing}: "
    if isinstance(error, OSError):
        numbers = [] if error.errno is None else [error.errno]
        return ["OSError", *numbers, f"{words}{error.strerror or error}"]
    return ["PluginError", f"{words}{type(error).__name__}: {error}"]


def _tell(transport: Transport, value: Any) -> Any:
    """Return rank 0's value, of plain values, on all ranks. Collective."""
    return _gather(transport, value if transport.rank == 0 else None)[0]


def _gather(transport: Transport, value: Any) -> list[Any]:
    """Return all ranks' values, of plain values, by rank. Collective."""
    message = np.frombuffer(b"" if value is None else json.dumps(value).encode(), np.uint8)
    sizes = transport.allgather(np.array([len(message)], np.int64))[:, 0]
    if not sizes.any():
        return [None] * transport.size
    return [json.loads(bytes(part) or b"null") for part in transport.allgatherv(message, sizes)]


def _move(transport: Transport, source: int, destination: int, memory: Values | Bytes) -> None:
    """Move one rank's values into another's memory, which has the same shape and dtype on all. Collective."""
    if source == destination:
        return
    data = memory.view(np.uint8)
    for start in range(0, len(data), CHUNK):
        part = data[start:start + CHUNK]
        outgoing = {destination: part} if transport.rank == source else {}
        incoming = {source: len(part)} if transport.rank == destination else {}
        for batch in transport.send_and_receive(outgoing, incoming):
            for _, message in batch:
                part[:] = message
