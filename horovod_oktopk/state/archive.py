"""The file of a state: a zip archive of `records.json` and one .npy for each residual. It knows of no other ranks.

`records.json` has a version, the marks, and the records of all reductions, each with the number of its optimizer.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError
from ..vectors.sparse import Values
from .records import Record, check_records

PathLike = str | os.PathLike[str]
VERSION = 1
RECORDS = "records.json"


def _host() -> str:
    """Return a name for where a process number means one process: this host, or this container on it."""
    name = re.sub(r"\W", "_", socket.gethostname())[:40]
    with suppress(OSError):
        return f"{name}-{Path('/proc/self/ns/pid').stat().st_ino}"
    return name


HOST = _host()
PART = re.compile(rf".+\.{HOST}-(\d+)\.oktopk\.part")
"""Names of unfinished files of this host, with the number of the process that writes them."""


class Writer:
    """A writer of a file beside its place, where the file appears whole or not at all.

    The caller ends with `finish` or `discard`. Every method but `discard` may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        _remove_left_behind(path.parent)
        self._path = path
        self._part = path.with_name(f"{path.name}.{HOST}-{os.getpid()}.oktopk.part")
        self._file = self._part.open("wb")
        self._archive = zipfile.ZipFile(self._file, "w")

    def write(self, name: str, residual: Values) -> None:
        """Add a residual, shape (n,)."""
        with self._archive.open(name, "w", force_zip64=True) as file:
            np.lib.format.write_array(file, residual)  # type: ignore[no-untyped-call]

    def finish(self, content: Mapping[str, Any]) -> None:
        """Add the records and rename the file into place, with its contents on the disk before it has its name.

        Raise OptionError if the content is not of plain values.
        """
        try:
            text = json.dumps({"version": VERSION, **content})
        except (TypeError, ValueError) as error:
            raise OptionError("what is stored beside the state must be plain values (numbers, texts, lists): "
                              f"{error}. Convert them first") from error
        self._archive.writestr(RECORDS, text)
        self._archive.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._path)
        _sync(self._path.parent)

    def discard(self) -> None:
        """Remove the unfinished file. After `finish` there is nothing to remove. Raise nothing."""
        for close in (self._archive.close, self._file.close):  # a full disk fails here once more
            with suppress(OSError, ValueError):
                close()
        with suppress(OSError):
            self._part.unlink()


class Reader:
    """A reader of a file. All its methods raise OptionError if the file cannot be read, or is damaged."""

    def __init__(self, path: PathLike) -> None:
        with _explained():
            self._archive = zipfile.ZipFile(path)
            content = json.loads(self._archive.read(RECORDS))
            _check(content)
            self.marks: dict[str, Any] = content["marks"]
            self.owners: list[int] = content["optimizers"]
            """The optimizer of each reduction, by number."""
            self.reductions: list[list[Record]] = content["reductions"]
            for record in itertools.chain(*self.reductions):
                record["residual"] = partial(self._residual, record["residual"]["file"])

    def _residual(self, name: str) -> Values:
        """Return a residual, as it was written; its length and type are still to be checked."""
        with _explained(), self._archive.open(name) as file:
            values: Values = np.lib.format.read_array(file)  # type: ignore[no-untyped-call]
            if file.read(1):  # what is read to its end has been compared with its checksum
                raise OptionError(f"the file is damaged: {name} is longer than it says; load another one")
        return values

    def close(self) -> None:
        """Close the file."""
        self._archive.close()


@contextmanager
def _explained() -> Iterator[None]:
    """Turn any error of the parsers of zip, JSON and NumPy for a damaged file into an OptionError."""
    try:
        yield
    except OptionError:
        raise
    except OSError as error:
        raise OptionError(f"the file cannot be read: {type(error).__name__}: {error}. "
                          "Give a path that rank 0 can read") from error
    except Exception as error:  # also zlib's and struct's, NotImplementedError, RuntimeError, MemoryError
        raise OptionError(f"the file is damaged: {type(error).__name__}: {error}. Load another one") from error


def _check(content: Any) -> None:
    if not isinstance(content, dict) or "version" not in content:
        raise OptionError(f"the file has no version: load one that save_state has written, of version {VERSION}")
    if content["version"] != VERSION:
        raise OptionError(f"the file is of version {content['version']!r}, and this package reads version {VERSION}: "
                          "load it with the package that wrote it")
    for records in content["reductions"]:
        check_records(records)
        if not records:
            raise OptionError("the file is damaged: a reduction has no records; load another one")


def _sync(folder: Path) -> None:
    """Write the name to the disk, too; some network file systems cannot do that, and need not."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_left_behind(folder: Path) -> None:
    """Remove unfinished files of this host's ended processes; other processes may still write theirs."""
    with suppress(OSError):  # as of a network file system: the file can be written nevertheless
        for path in folder.glob("*.oktopk.part"):
            if found := PART.fullmatch(path.name):
                with suppress(OSError):  # also if the process is another user's
                    try:
                        os.kill(int(found[1]), 0)
                    except (ProcessLookupError, OverflowError):
                        path.unlink()
