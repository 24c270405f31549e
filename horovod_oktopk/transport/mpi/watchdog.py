"""Notice to the other ranks when one ends, and of the ranks that are missing, as Horovod gives for its collectives.

Each process has one thread that watches all its MPI transports. Ranks send each other small messages there:

- *stopped*: a rank uses this transport no more. It says after how many operations, which rank ended, why, and whether
  some rank does not answer. A rank that waits in a later operation is woken, and raises an error. A rank in an
  earlier operation ends it first.
- *asked*, *told*: a rank that has waited for long asks all others how far they are, and names those that are missing.

When a process has stopped everywhere, its thread meets the others' in one of Horovod's own collectives. After that
no thread is inside MPI, and Horovod may end it. A rank that does not answer never comes there, and Horovod's shutdown
would wait for ever. Then any rank that comes to its end ends the job.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..stalls import StallLimits
from .transport import MPITransport

logger = logging.getLogger("horovod_oktopk")

LOOK = 0.05
"""Seconds between two looks for messages."""
ANSWERS = 1.0
"""Seconds within which a running rank answers how far it is."""
LAST_WORDS = 60.0
"""Seconds for which a process that ends waits for the others to stop, at most; reached only if one hangs."""
SHORT_WORDS = 3.0
"""Seconds of the same wait if a rank does not answer; and the least, whatever Horovod's limit for stalls is."""
NO_ANSWER = ("this rank ends the whole job, as another rank does not answer, and to shut Horovod down in order would "
             "take for ever: %s. Look at the host of the rank that does not answer")


@dataclass
class Watched:
    """One transport, and what is known of its other ranks.

    The members are world ranks, by rank. `meet` waits for all of them by Horovod's collectives.
    The parent is the transport of more ranks, if these are some of them, working on the same steps. Steps begun there
    are ended here.
    """

    transport: MPITransport
    members: tuple[int, ...]
    meet: Callable[[], None]
    parent: Watched | None = None
    has_stopped: bool = False
    told: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The ranks' last answers: operations begun, and seconds since they were last in one."""
    asked: float | None = None
    """The time of the open question to the ranks, by time.monotonic; None if there is none."""
    warned: float = 0.0
    """Seconds that this rank had waited when it last asked."""

    def number(self, rank: int) -> int:
        """Return a rank's number as its program knows it."""
        return rank if self.parent is None else self.parent.members.index(self.members[rank])

    def tell_all(self, message: Any) -> None:
        for rank in range(self.transport.size):
            if rank != self.transport.rank:
                self.transport.control.send(rank, message)


class Watchdog:
    """The watching thread of this process, which has this world rank, in a job of `size` ranks."""

    def __init__(self, rank: int, size: int, limits: StallLimits) -> None:
        self._rank, self._size = rank, size
        self._limits = limits
        self._watched: list[Watched] = []
        self._end: tuple[int, str] | None = None  # which world rank has ended, and the reason
        self._one_is_silent = False  # some rank does not answer, and was given up
        self._deadline: float | None = None  # until when to wait for the others' end, by time.monotonic
        self._thread = threading.Thread(target=self._run, name="horovod_oktopk.watchdog", daemon=True)
        self._thread.start()

    def watch(self, transport: MPITransport, members: tuple[int, ...], meet: Callable[[], None],
              parent: MPITransport | None = None) -> None:
        """Watch a transport from now on, until this process stops; see Watched."""
        of = next((each for each in self._watched if each.transport is parent), None)
        self._watched.append(Watched(transport, members, meet, of))

    def stop(self, reason: str) -> None:
        """End this process's use of MPI; return when no other process uses it either.

        End the job if some process does not stop within Horovod's limit for stalls, if there is one.
        The reason is the text for the others: "has ended".
        """
        self._end = self._end or (self._rank, f"rank {self._rank} {reason}")
        limit = self._limits.shutdown
        self._deadline = self._deadline or time.monotonic() + (max(limit, SHORT_WORDS) if limit else LAST_WORDS)
        while self._thread.is_alive() and time.monotonic() < self._deadline:
            self._thread.join(SHORT_WORDS if self._one_is_silent else LOOK)
            if self._one_is_silent:
                break
        if self._one_is_silent or (limit and self._thread.is_alive()):
            logger.critical(NO_ANSWER, self._end[1])
            sys.stdout.flush()
            self._watched[0].transport.abort()
        if self._thread.is_alive():
            logger.warning("this rank ends, though some others have not stopped communicating for %g s: "
                           "see where they stand (py-spy dump)", LAST_WORDS)

    def _run(self) -> None:
        try:
            while self._end is None:
                time.sleep(LOOK)
                for each in self._watched.copy():
                    self._receive(each)
                    self._check_stall(each)
            self._close(*self._end)
        except Exception:
            logger.exception("the thread that tells other ranks when this one ends has failed: they may hang then. "
                             "Report this, with the traceback")

    def _receive(self, each: Watched) -> None:
        gate, control = each.transport.gate, each.transport.control
        for source, (kind, *content) in control.receive():
            if kind == "stopped":
                done, ended, reason, one_is_silent = content
                self._one_is_silent |= one_is_silent
                gate.close(reason, after=done)
                self._end = self._end or (ended, reason)
            elif kind == "asked":
                control.send(source, ("told", gate.begun, gate.idle()))
            else:
                each.told[source] = content[0], content[1]

    # The end.

    def _close(self, ended: int, reason: str) -> None:
        """Stop every transport, then meet the other processes."""
        present = self._watched.copy()
        while remaining := [each for each in present if not each.has_stopped]:
            for each in remaining:
                # If another of its ranks has ended, that one's own message says after which operation.
                says_itself = ended in each.members and ended != self._rank
                if not says_itself and (each.parent is None or each.parent.has_stopped):
                    each.transport.gate.close(reason)
                self._receive(each)
                if each.transport.gate.is_stuck:
                    each.transport.wake()
                if each.transport.gate.is_quiet(LOOK / 10):
                    each.tell_all(("stopped", each.transport.gate.done, ended, reason, self._one_is_silent))
                    each.transport.close()
                    each.has_stopped = True
        if self._one_is_silent:
            return
        self._meet(sorted(present, key=lambda each: (each.members, each.transport.channel)))

    def _meet(self, present: list[Watched]) -> None:
        """Meet the others, in the same order everywhere, until all ranks of the job are known to have stopped.

        A rank that comes out of a meeting knows that its members have stopped; out of the next one, that those with
        whom they share other transports have, and so on: (P - 1) / (members - 1) meetings reach every rank.
        """
        meetings = {id(each): -(-(self._size - 1) // (len(each.members) - 1)) for each in present
                    if len(each.members) > 1}
        with suppress(RuntimeError):  # a rank that comes out of its last meeting ends Horovod: all have stopped then
            for number in range(max(meetings.values(), default=0)):
                for each in present:
                    if number < meetings.get(id(each), 0):
                        each.meet()

    # Stalls.

    def _check_stall(self, each: Watched) -> None:
        waited = each.transport.gate.waited()
        if waited < each.warned:
            each.asked, each.warned = None, 0.0  # another wait
        elif each.asked is not None:
            if time.monotonic() > each.asked + ANSWERS:
                each.asked = None
                self._report_stall(each, waited)
        elif self._is_long(waited, each.warned):
            each.asked, each.warned = time.monotonic(), waited
            each.told.clear()
            each.tell_all(("asked",))

    def _is_long(self, waited: float, warned: float) -> bool:
        warning, shutdown = self._limits.warning, self._limits.shutdown
        return bool((warning and waited > warned + warning) or (shutdown and waited > shutdown))

    def _report_stall(self, each: Watched, waited: float) -> None:
        transport = each.transport
        others = set(range(transport.size)) - {transport.rank}
        # A rank that is inside an operation waits itself, for whoever is missing.
        behind = sorted(rank for rank in others if each.told.get(rank, (0, 0.0))[0] < transport.gate.begun)
        missing = [rank for rank in behind if rank not in each.told or each.told[rank][1]] or behind
        if not waited or not missing:
            return
        text = (f"rank {each.number(transport.rank)} has waited for {waited:.0f} s for ranks "
                f"{[each.number(rank) for rank in missing]} to come to a reduction; {_since(missing, each)}")
        if self._limits.shutdown and waited > self._limits.shutdown:
            self._one_is_silent |= any(rank not in each.told for rank in missing)
            self._end = self._end or (
                self._rank, f"{text}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is "
                f"{self._limits.shutdown:g}. See what those ranks did last")
            transport.gate.close(self._end[1], after=transport.gate.done)
        elif transport.rank < min(others - set(missing), default=transport.size):  # one of those that wait says it
            logger.warning("stalled: %s; HOROVOD_STALL_CHECK_TIME_SECONDS is %g. See where they stand (py-spy dump), "
                           "or raise the variable if such waits are normal", text, self._limits.warning)


def _since(missing: list[int], each: Watched) -> str:
    return ", ".join(f"rank {each.number(rank)} was in the last one {each.told[rank][1]:.0f} s ago"
                     if rank in each.told else f"rank {each.number(rank)} does not answer" for rank in missing)
