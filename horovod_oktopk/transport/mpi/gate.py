"""Permission of this process to use MPI on a communicator, and its present activity there.

Horovod ends MPI in all processes as soon as one of them shuts it down. Gates are closed before that: then no thread
is inside MPI any more, and a later call gets an error that says why.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ...errors import TransportError


class Gate:
    """A gate shared by the thread that communicates over a communicator, and the watchdog.

    All ranks begin the same operations, in the same order. begun, done: the number of operations of this rank.
    """

    def __init__(self) -> None:
        self.begun = self.done = 0
        self._limit: int | None = None  # no operation after this one; None: open
        self.reason = ""
        """The reason why the gate is closed."""
        self._inside = 0
        self._since: float | None = None
        self._left = time.monotonic()
        self._changed = threading.Condition()

    # For the thread that communicates.

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Take part in one operation inside the block. Raise TransportError if the gate is closed."""
        with self._changed:
            self._check(self.begun + 1)
            self.begun += 1
        yield
        self.done = self.begun

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Bracket a call into MPI; leave it as soon as `check` raises.

        Raise TransportError if the gate is closed for the present operation.
        """
        with self.busy(self.begun):
            self._since = time.monotonic()
            try:
                yield
            finally:
                self._since, self._left = None, time.monotonic()

    def moment(self) -> AbstractContextManager[None]:
        """Bracket a call into MPI outside of any operation, which waits for no other rank.

        Raise TransportError once the gate is closed.
        """
        return self.busy(math.inf)

    @contextmanager
    def busy(self, operation: float = 0) -> Iterator[None]:
        """Count the block as an operation in progress, so that the gate does not become quiet.

        An operation that has begun here continues on other communicators of the same ranks.
        Raise TransportError if the gate is closed for the operation of this number, by default for none.
        """
        with self._changed:
            self._check(operation)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raise TransportError if the operation that runs will not end."""
        self._check(self.begun)

    def _check(self, operation: float) -> None:
        if self._limit is not None and operation > self._limit:
            raise TransportError(self.reason)

    # For the watchdog.

    def close(self, reason: str, after: int | None = None) -> None:
        """Let no operation begin after number `after`; without it, after the last that has begun."""
        with self._changed:
            limit = self.begun if after is None else after
            if self._limit is None or limit < self._limit:
                self._limit, self.reason = limit, self.reason or reason

    def is_quiet(self, timeout: float) -> bool:
        """Return True if the gate is closed, and within `timeout` seconds no thread is inside MPI, nor will be."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._inside and self._limit is not None and self.begun >= self._limit, timeout)

    @property
    def is_stuck(self) -> bool:
        """True if a thread waits in an operation that will not end."""
        return self._inside > 0 and self._limit is not None and self.begun > self._limit

    def waited(self) -> float:
        """Return the seconds for which this rank has waited in the operation that runs; 0 if none runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def idle(self) -> float:
        """Return the seconds since this rank was last inside MPI; 0 while it is inside."""
        return 0.0 if self._inside else time.monotonic() - self._left
