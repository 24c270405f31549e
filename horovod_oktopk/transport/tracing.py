"""Spans for phases in the frameworks' profilers, beside the step report."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

logger = logging.getLogger("horovod_oktopk")

Span = Callable[[str], AbstractContextManager[Any]]
"""A function that makes the context for a span of this name."""

_spans: list[Span] = []


def show_phases(span: Span) -> None:
    """Put every later phase of this process, on any of its threads, in a span "oktopk/<phase>"."""
    _spans.append(span)


def phase_span(phase: str) -> AbstractContextManager[Any]:
    """Return the context to run a phase in."""
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


@functools.cache  # once in a process
def explain_timeline() -> None:
    """Log where the phases are shown, if the job asks for Horovod's timeline, which does not see them over MPI."""
    if os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") != "DYNAMIC":
        logger.warning("HOROVOD_TIMELINE shows no phases of OkTopk: use the framework's profiler, torch.profiler or "
                       "tf.profiler, which has a span for each")
