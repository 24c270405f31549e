"""Who is told when a phase begins and ends, beside the step report: profilers, and Horovod's timeline."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger("horovod_oktopk")

Span = Callable[[str], AbstractContextManager[Any]]
"""Makes what is entered while something of this name goes on."""

_spans: list[Span] = []
PID = 1_000_000
"""Of our row in the picture; Horovod counts its own from 0, one for each tensor."""


def show_phases(span: Span) -> None:
    """From now on every phase of this process, on any of its threads, lies in a span "oktopk/<phase>"."""
    _spans.append(span)


def phase_span(phase: str) -> AbstractContextManager[Any]:
    """What a phase is entered with."""
    name = f"oktopk/{phase}"
    if len(_spans) > 1:
        return _all_spans(name)
    return _spans[0](name) if _spans else nullcontext()


@contextmanager
def _all_spans(name: str) -> Iterator[None]:
    with ExitStack() as entered:
        for span in _spans:
            entered.enter_context(span(name))
        yield


class Timeline:
    """Writes spans into a file of Chrome's trace format, as Horovod's timeline is, on the same clock."""

    def __init__(self, file: TextIO, start: float) -> None:
        """start: time 0, in microseconds since the epoch."""
        self._file, self._start = file, start
        self._lock = threading.Lock()
        self._threads: dict[int, int] = {}  # by their idents: their numbers in the file
        file.write("[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": PID,
                                       "args": {"name": "oktopk", "start_time_since_epoch_in_micros": start}}))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens inside is an event."""
        begin = time.time_ns()
        try:
            yield
        finally:
            self._write({"name": name, "ph": "X", "pid": PID, "ts": begin / 1000 - self._start,
                         "dur": (time.time_ns() - begin) / 1000})

    def close(self) -> None:
        """What comes later is not written."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                event["tid"] = self._threads.setdefault(threading.get_ident(), len(self._threads))
                self._file.write(",\n" + json.dumps(event))


_timeline: Timeline | None = None


def begin_timeline() -> None:
    """On the rank that writes Horovod's timeline, with HOROVOD_TIMELINE: our phases go into a file beside it.

    "timeline.json" has "timeline.oktopk.json" beside it. Once in a process. If the file cannot be written, a warning
    says so, as Horovod does of its own: the other ranks wait for this one.
    """
    global _timeline
    path = os.environ.get("HOROVOD_TIMELINE", "DYNAMIC")
    if _timeline is not None or path == "DYNAMIC":  # that one is begun by a call, and by none of ours
        return
    timeline = Path(path)
    try:
        file = timeline.with_suffix(".oktopk.json").open("w")
    except (OSError, ValueError) as error:
        logger.warning("no timeline of the phases is written: %s", error)
        return
    _timeline = Timeline(file, _start_of(timeline))
    atexit.register(_timeline.close)
    show_phases(_timeline.span)


def _start_of(timeline: Path) -> float:
    """Of Horovod's timeline, as its first record has it; now, if it cannot be read."""
    try:
        first = timeline.read_text().split("\n", 2)[1].rstrip(",")
        return float(json.loads(first)["args"]["start_time_since_epoch_in_micros"])
    except (OSError, LookupError, ValueError):
        return time.time_ns() / 1000
