"""What scenarios share: gradients that are known exactly, and comparisons over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from horovod_oktopk import AgreementError, OkTopk

SHAPES = {"b.weight": (7, 5), "a.bias": (11,), "c.scale": (3, 2, 4), "d": (1,)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())
DENSE = OkTopk(density=1.0, threshold_interval=1)
"""Selects everything at every step: the result is the dense sum."""


class Skipped(Exception):
    """A scenario does not apply to this job. Raised on all ranks, before they do anything together."""


def needs(available: bool, what: str) -> None:
    """Ends the scenario as skipped if the job does not have what it needs; the same on all ranks."""
    if not available:
        raise Skipped(f"needs {what}")


def needs_ranks(hvd: Any, least: int = 2) -> None:
    needs(hvd.size() >= least, f"{least} ranks")


def gradients(step: int, rank: int, dtype: Any = np.float32, shapes: Mapping[str, tuple[int, ...]] | None = None,
              ) -> dict[str, np.ndarray]:
    """Integers, so that sums are exact in any order."""
    rng = np.random.default_rng((step, rank))
    return {name: rng.integers(-64, 65, shape).astype(dtype) for name, shape in (shapes or SHAPES).items()}


def flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """One vector, in name order."""
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


def total(hvd: Any, step: int) -> np.ndarray:
    """The sum of all ranks' gradients."""
    return sum(flat(gradients(step, rank)) for rank in range(hvd.size()))


def everywhere(hvd: Any, value: Any) -> list[Any]:
    """Every rank's value."""
    return hvd.allgather_object(value)


def assert_equal_everywhere(hvd: Any, values: Mapping[str, np.ndarray]) -> None:
    """The same bits on every rank."""
    assert len(set(everywhere(hvd, flat(values).tobytes()))) == 1, "the replicas differ"


def topk(vector: np.ndarray, k: int) -> np.ndarray:
    """The dense oracle: everything but the k largest magnitudes is zero; ties go to the lower index."""
    kept = np.zeros_like(vector)
    order = np.argsort(-np.abs(vector), kind="stable")[:k]
    kept[order] = vector[order]
    return kept


def raised_everywhere(hvd: Any, kind: type[Exception], action: Any) -> list[str]:
    """The messages of the error that `action` raises on every rank: itself, or as a graph passes it on."""
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
    """All ranks raise the same AgreementError, with the expected words; alone, there is nothing to disagree with."""
    if hvd.size() == 1:
        action()
        return
    messages = raised_everywhere(hvd, AgreementError, action)
    assert len(set(messages)) == 1, messages
    for text in expected:
        assert text in messages[0], messages[0]


def is_last(hvd: Any) -> bool:
    return hvd.rank() == hvd.size() - 1


@contextmanager
def shared_folder(hvd: Any) -> Iterator[Path]:
    """The same empty folder on all ranks."""
    import tempfile
    with tempfile.TemporaryDirectory() as mine:
        yield Path(hvd.broadcast_object(mine, root_rank=0))
        hvd.allgather_object("done with it")


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of the plugin of at least this level."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("horovod_oktopk")
    handler.emit = lambda record: messages.append(record.getMessage())
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(before)
