"""Whether this process may still use MPI on a communicator, and what it is doing there now.

Horovod ends MPI in all processes as soon as one of them shuts it down. Gates are closed before that: then nobody is
inside MPI any more, and whoever comes gets an error that says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import TransportError


class Gate:
    """Shared by the thread that communicates over a communicator, and the watchdog.

    All ranks begin the same operations, in the same order. begun, done: how many of them this rank has.
    """

    def __init__(self) -> None:
        self.begun = self.done = 0
        self._limit: int | None = None  # no operation after this one; None: open
        self.reason = ""
        """Why it is closed."""
        self._inside = 0
        self._since: float | None = None
        self._left = time.monotonic()
        self._changed = threading.Condition()

    # For the thread that communicates.

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Inside, this rank takes part in one operation. Raises TransportError where the gate is closed."""
        with self._changed:
            self._check(self.begun + 1)
            self.begun += 1
        yield
        self.done = self.begun

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, MPI is called; to be left soon after `check` raises. Raises TransportError where that is so."""
        with self._changed:
            self._check(self.begun)
            self._inside, self._since = self._inside + 1, time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._inside, self._since, self._left = self._inside - 1, None, time.monotonic()
                self._changed.notify_all()

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Inside, MPI is called outside of any operation, and waits for nobody.

        Raises TransportError once the gate is closed.
        """
        with self._changed:
            if self._limit is not None:
                raise TransportError(self.reason)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the gate is not quiet: what has begun here goes on, on other communicators of the same ranks."""
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raises TransportError where the operation that runs will not end."""
        self._check(self.begun)

    def _check(self, operation: int) -> None:
        if self._limit is not None and operation > self._limit:
            raise TransportError(self.reason)

    # For the watchdog.

    def close(self, reason: str, after: int | None = None) -> None:
        """No operation begins after the one of this number, or after the last that has begun."""
        with self._changed:
            limit = self.begun if after is None else after
            if self._limit is None or limit < self._limit:
                self._limit, self.reason = limit, self.reason or reason

    def is_quiet(self, timeout: float) -> bool:
        """Whether nobody is inside MPI, nor will be, within so many seconds; once closed."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._inside and self._limit is not None and self.begun >= self._limit, timeout)

    @property
    def is_stuck(self) -> bool:
        """Whether somebody waits in an operation that will not end."""
        return self._inside > 0 and self._limit is not None and self.begun > self._limit

    def waited(self) -> float:
        """Seconds for which this rank has waited in the operation that runs; 0 where none does."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def idle(self) -> float:
        """Seconds since this rank was last inside; 0 where it is."""
        return 0.0 if self._inside else time.monotonic() - self._left
