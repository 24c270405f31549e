"""The part of a step that communicates, beside the program's next step; and the changes that follow here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from ...phases.agreement import Measured
from ...schemes.step_result import StepResult
from ...vectors.sparse import DenseVector, SparseVector


@dataclass(frozen=True)
class Outcome:
    """The outcome of an exchange."""

    result: StepResult
    update: SparseVector | DenseVector | None
    """The vector to subtract from w; None if a step was not taken."""
    change: SparseVector | DenseVector | None
    """The vector to add to p."""
    measured: Measured | None = None
    """The measurements that all ranks have told of their gradients."""


class Exchange:
    """A thread that runs one exchange at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[Outcome] | None = None

    def begin(self, run: Callable[[], Outcome], at_once: bool) -> None:
        """Run an exchange in the thread; or run it at once, if `at_once`, and keep its outcome for `end`."""
        if at_once:
            self._under_way = _done(run)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "horovod_oktopk")
            self._under_way = self._thread.submit(run)

    @property
    def is_under_way(self) -> bool:
        """True if an exchange has begun, and `end` or `drop` was not called since."""
        return self._under_way is not None

    def end(self) -> Outcome:
        """Wait for the exchange; return its outcome, or raise its error."""
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        return under_way.result()

    def drop(self) -> None:
        """Wait for the exchange, so that none of its messages meets a later one; drop its outcome or error."""
        if self._under_way is not None:
            wait_for([self._under_way])
            self._under_way = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the exchange has ended, or for `timeout` seconds at most. `end` is still to be called."""
        if self._under_way is not None:
            wait_for([self._under_way], timeout)


def _done(run: Callable[[], Outcome]) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    try:
        future.set_result(run())
    except Exception as error:
        future.set_exception(error)
    return future
