"""The part of a step that communicates, beside the program's next step; and what it changes here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from ..phases.agreement import Measured
from ..schemes.step_result import StepResult
from ..vectors.sparse import DenseVector, SparseVector


@dataclass(frozen=True)
class Outcome:
    """What an exchange gave."""

    result: StepResult
    update: SparseVector | DenseVector | None
    """What w is to lose; None where a step was not taken."""
    change: SparseVector | DenseVector | None
    """What is to be added to p."""
    measured: Measured | None = None
    """What all ranks have told of their gradients."""


class Exchange:
    """At most one is under way. It has a thread of its own."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[Outcome] | None = None

    def begin(self, run: Callable[[], Outcome], at_once: bool) -> None:
        """Runs it in the thread; or at once, and then it only seems to be under way."""
        if at_once:
            self._under_way = _done(run)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "horovod_oktopk")
            self._under_way = self._thread.submit(run)

    @property
    def is_under_way(self) -> bool:
        """Whether one has begun, and its end was not asked for."""
        return self._under_way is not None

    def end(self) -> Outcome:
        """Waits for it; gives what it gave, or raises what it raised."""
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        return under_way.result()

    def drop(self) -> None:
        """Waits for it, so that none of its messages meets one that follows; what it gives or raises is dropped."""
        if self._under_way is not None:
            wait_for([self._under_way])
            self._under_way = None

    def wait(self, timeout: float | None = None) -> None:
        """Until it has ended, or for so many seconds at most; it stays under way."""
        if self._under_way is not None:
            wait_for([self._under_way], timeout)


def _done(run: Callable[[], Outcome]) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    try:
        future.set_result(run())
    except Exception as error:
        future.set_exception(error)
    return future
