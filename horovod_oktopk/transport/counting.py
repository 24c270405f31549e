"""A transport that counts and times what crosses it, by phase, and shows phases in the frameworks' profilers."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

from .base import Bytes, Counts, Signals, Transport, Values, alltoall_rounds

logger = logging.getLogger("horovod_oktopk")

Phase = Literal["agree", "accumulate", "select", "split_and_reduce", "global_select", "balance", "allgatherv", "sum",
                "reduce_tree", "broadcast_tree", "allreduce", "write_back",
                "host_agree", "host_sum", "host_select", "host_gather"]
"""The phases of a step, as reports and profilers name them; StepReport says which ones move indices and values."""

Span = Callable[[str], AbstractContextManager[Any]]
"""A function that makes the context for a span of this name."""

_spans: list[Span] = []


def show_phases(span: Span) -> None:
    """Put every later phase of this process, on any of its threads, in a span "oktopk/<phase>"."""
    _spans.append(span)


@functools.cache  # once in a process
def explain_timeline() -> None:
    """Log where the phases are shown, if the job asks for Horovod's timeline, which does not see them over MPI."""
    if os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") != "DYNAMIC":
        logger.warning("HOROVOD_TIMELINE shows no phases of OkTopk: use the framework's profiler, torch.profiler or "
                       "tf.profiler, which has a span for each")


@dataclass
class Traffic:
    """Messages, bytes and seconds of one rank in one phase of one step."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Log:
    """The traffic of a rank by phase; several transports may share one log."""

    phases: dict[str, Traffic] = field(default_factory=dict)
    phase: Phase = "agree"
    inside: float = 0.0
    """Seconds of phases inside the present one; they count for those phases alone."""


@dataclass
class CountingTransport(Transport):
    """A transport that counts what another one sends and receives.

    Messages are counted as they are, and a collective as its bandwidth-optimal algorithm: an allgather as a ring (a
    rank sends every block but that of the rank after it), an alltoall as MPITransport's, an allreduce as
    reduce-scatter and allgather.

    A step is taken in the context `step`. A rank that ends tells everyone; a rank inside the context ends its step
    first. `route` tells in words which network carries the messages, and why.
    """

    inner: Transport
    log: Log = field(default_factory=Log)
    step: Callable[[], AbstractContextManager[None]] = nullcontext
    route: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self.rank = self.inner.rank
        self.size = self.inner.size
        self.concurrent: bool = self.inner.concurrent

    @property
    def phases(self) -> dict[str, Traffic]:
        return self.log.phases

    def reset(self) -> None:
        """Start a new count."""
        self.log.phases = {}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count and time the block under `name`. A phase inside it counts for itself only."""
        log = self.log
        outer, log.phase, before, log.inside = log.phase, name, log.inside, 0.0
        start = time.perf_counter()
        try:
            with ExitStack() as entered:
                for span in _spans:
                    entered.enter_context(span(f"oktopk/{name}"))
                yield
        finally:
            seconds = time.perf_counter() - start
            self.traffic.seconds += seconds - log.inside
            log.phase, log.inside = outer, before + seconds

    @property
    def traffic(self) -> Traffic:
        """The count of the present phase."""
        return self.log.phases.setdefault(self.log.phase, Traffic())

    def allgather(self, row: Counts) -> Counts:
        length = row.nbytes * (self.size - 1)
        self._count(length, length, self.size - 1)
        return self.inner.allgather(row)

    def alltoall(self, rows: Counts) -> Counts:
        messages = [moved for each in alltoall_rounds(self.size) for _, moved in each]
        length = rows[0].nbytes * sum(map(len, messages))
        self._count(length, length, len(messages))
        return self.inner.alltoall(rows)

    def allreduce(self, values: Values) -> Values:
        moved = 2 * values.nbytes * (self.size - 1) // self.size
        self._count(moved, moved, 2 * (self.size - 1))
        return self.inner.allreduce(values)

    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        self._count(sum(map(len, outgoing.values())), sum(incoming.values()), len(outgoing), len(incoming))
        return self.inner.send_and_receive(outgoing, incoming)

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        total, after = int(sizes.sum()), int(sizes[(self.rank + 1) % self.size])
        self._count(total - after, total - len(message), self.size - 1)
        return self.inner.allgatherv(message, sizes)

    def signals(self) -> Signals | None:
        return self.inner.signals()

    def abort(self) -> None:
        self.inner.abort()

    def _count(self, sent: int, received: int, messages: int, messages_received: int | None = None) -> None:
        traffic = self.traffic
        traffic.bytes_sent += sent
        traffic.bytes_received += received
        traffic.messages_sent += messages
        traffic.messages_received += messages if messages_received is None else messages_received
