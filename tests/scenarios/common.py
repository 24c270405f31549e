"""Helpers of scenarios: gradients that are known exactly, and comparisons over the ranks."""

from __future__ import annotations

import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from horovod_oktopk import AgreementError, OkTopk

SHAPES = {"b.weight": (7, 5), "a.bias": (11,), "c.scale": (3, 2, 4), "d": (1,)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())
DENSE = OkTopk(density=1.0, threshold_interval=1)
"""Selects everything at every step: the result is the dense sum."""


class Skipped(Exception):
    """A scenario does not apply to this job. Raised on all ranks, before they do anything together."""


def needs(available: bool, what: str) -> None:
    """Skip the scenario if the job does not have what it needs; the same on all ranks."""
    if not available:
        raise Skipped(f"needs {what}")


def needs_ranks(hvd: Any, least: int = 2) -> None:
    needs(hvd.size() >= least, f"{least} ranks")


def needs_one_rank(hvd: Any) -> None:
    needs(hvd.size() == 1, "one rank alone")


def k_of(hvd: Any, density: float) -> int:
    """Return the number of elements that a step selects: all on one rank, where nothing is compressed."""
    return round(density * N) if hvd.size() > 1 else N


def gradients(step: int, rank: int, dtype: Any = np.float32, shapes: Mapping[str, tuple[int, ...]] | None = None,
              ) -> dict[str, np.ndarray]:
    """Return integers, so that sums are exact in any order."""
    return {name: values.astype(dtype) for name, values in _integers(step, rank, tuple((shapes or SHAPES).items()))}


@functools.cache
def _integers(step: int, rank: int, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> list[tuple[str, np.ndarray]]:
    rng = np.random.default_rng((step, rank))
    return [(name, rng.integers(-64, 65, shape)) for name, shape in shapes]


def flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return one vector, in name order."""
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


def host_sizes(size: int) -> list[int]:
    """Return the numbers of ranks that a host may have."""
    return [length for length in range(2, size + 1) if size % length == 0]


def total(hvd: Any, *steps: int) -> np.ndarray:
    """Return the sum of all ranks' gradients at these steps."""
    return sum(flat(gradients(step, rank)) for step in steps for rank in range(hvd.size()))


def everywhere(hvd: Any, value: Any) -> list[Any]:
    """Return every rank's value."""
    return hvd.allgather_object(value)


def assert_equal_everywhere(hvd: Any, values: Mapping[str, np.ndarray]) -> None:
    """Assert that every rank has the same bits."""
    assert len(set(everywhere(hvd, flat(values).tobytes()))) == 1, "the replicas differ"


def take_steps(hvd: Any, trainer: Any, *steps: int) -> None:
    """Take steps with this rank's gradients."""
    for step in steps:
        trainer.step(gradients(step, hvd.rank()))


def assert_conserved(hvd: Any, trainer: Any, computed: np.ndarray) -> None:
    """Assert equal replicas, and that what was computed is applied or in a residual. The learning rate is 1."""
    assert_equal_everywhere(hvd, trainer.values())
    held = sum(everywhere(hvd, trainer.residual()))
    assert np.array_equal(held - flat(trainer.values()), computed)


def raised_everywhere(hvd: Any, kind: type[Exception], action: Any) -> list[str]:
    """Return the messages of the error that `action` raises on every rank: itself, or as a graph passes it on."""
    message = None
    try:
        action()
    except kind as error:
        message = str(error)
    except Exception as error:
        known = {"InvalidArgumentError": kind.__name__, "UnknownError": "HorovodAllreduce failed"}
        mark = f"{known.get(type(error).__name__)}: "
        if mark not in str(error):
            raise
        message = str(error).split(mark)[1].splitlines()[0]
    messages = everywhere(hvd, message)
    assert None not in messages, f"{kind.__name__} was raised on some ranks only: {messages}"
    return messages


def assert_disagreement(hvd: Any, action: Any, *expected: str) -> None:
    """Assert that all ranks raise the same AgreementError, with the expected words; one rank alone raises none."""
    if hvd.size() == 1:
        action()
        return
    messages = raised_everywhere(hvd, AgreementError, action)
    assert len(set(messages)) == 1, messages
    for text in expected:
        assert text in messages[0], messages[0]


def assert_options_must_agree(kind: Any, *cases: tuple[Any, ...]) -> None:
    """Try each case: the options of the last rank, those of the others, and the words of the error."""
    for last, others, *told in cases:
        trainer = kind(last if is_last(kind.hvd) else others)
        assert_disagreement(kind.hvd, functools.partial(take_steps, kind.hvd, trainer, 0), *told)


def is_last(hvd: Any) -> bool:
    return hvd.rank() == hvd.size() - 1


@contextmanager
def shared_folder(hvd: Any) -> Iterator[Path]:
    """Yield the same empty folder on all ranks."""
    import tempfile
    with tempfile.TemporaryDirectory() as mine:
        yield Path(hvd.broadcast_object(mine, root_rank=0))
        hvd.allgather_object("done with it")


T = TypeVar("T")
RANKS: set[int] = set()
"""The threads that are ranks, where ranks are threads: the log, warnings and the environment are the process's."""
_LOCK = threading.RLock()
_entered: dict[Any, tuple[ExitStack, list[None]]] = {}
_listening: dict[str, list[tuple[int, int, list[str]]]] = {"log": [], "warnings": []}
"""Listeners by source: thread, least level, and the messages."""


def computed_once(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function to keep its results; one rank computes them if ranks are threads."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def wrapped(*args: Any) -> T:
        with _LOCK:
            return cached(*args)

    return wrapped


@contextmanager
def _in_the_process(key: Any, make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Return a context that the first of the ranks in this process enters, and the last one leaves."""
    with _LOCK:
        if key not in _entered:
            _entered[key] = ExitStack(), []
            _entered[key][0].enter_context(make())
        stack, inside = _entered[key]
        inside.append(None)
    try:
        yield
    finally:
        with _LOCK:
            inside.pop()
            if not inside:
                del _entered[key]
                stack.close()


def environment(**variables: str) -> AbstractContextManager[None]:
    """Return a context in which these variables are set."""
    return _in_the_process(tuple(variables), lambda: mock.patch.dict(os.environ, variables))


@contextmanager
def _heard(source: str, level: int, make: Callable[[], AbstractContextManager[Any]]) -> Iterator[list[str]]:
    messages: list[str] = []
    listener = threading.get_ident(), level, messages
    with _in_the_process(source, make):
        _listening[source].append(listener)
        try:
            yield messages
        finally:
            _listening[source][:] = [each for each in _listening[source] if each is not listener]


def _tell(source: str, level: int, message: str) -> None:
    """Tell all listeners what this thread says, unless it is another rank's."""
    said_by = threading.get_ident()
    for heard_by, least, messages in list(_listening[source]):
        if level >= least and (said_by == heard_by or said_by not in RANKS):
            messages.append(message)


def logged(level: int = logging.WARNING) -> AbstractContextManager[list[str]]:
    """Return a context that gives the plugin's messages of at least this level."""
    return _heard("log", level, _logging)


@contextmanager
def _logging() -> Iterator[None]:
    handler, logger = logging.Handler(), logging.getLogger("horovod_oktopk")
    handler.emit = lambda record: _tell("log", record.levelno, record.getMessage())
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def warned() -> AbstractContextManager[list[str]]:
    """Return a context that gives the texts of Python's warnings."""
    return _heard("warnings", 0, _warning)


@contextmanager
def _warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: _tell("warnings", 0, str(message))
        yield
