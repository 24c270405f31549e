"""Names for the operations of Horovod that a program does not name, the same on all ranks."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd


def name_operations() -> None:
    """Have operations of Horovod that the program does not name be named by their order among those of a process set.

    Horovod names them by a count of all operations, in which those of an exchange beside the program come anywhere.
    """
    for name, start in list(vars(hvd.mpi_ops).items()):
        if name.startswith("_") and name.endswith("_async"):
            setattr(hvd.mpi_ops, name, _naming(start))


def _naming(start: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(start)

    @functools.wraps(start)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if call.arguments["name"] is not None:
            return start(*args, **kwargs)
        ranks = tuple(call.arguments["process_set"].ranks or ())  # an id may come again, for another set
        with _naming_one:
            call.arguments["name"] = f"{start.__name__}.unnamed.{_unnamed[ranks]}"
            handle = start(*call.args, **call.kwargs)
            _unnamed[ranks] += 1  # not before: Horovod may refuse what it is given, on one rank
        return handle

    return wrapped


_unnamed: Counter[tuple[int, ...]] = Counter()
"""Number of operations that the program has not named, by the ranks of the process set."""
_naming_one = threading.Lock()


def forget_names() -> None:
    """Begin anew with the names, as all ranks do when Horovod does."""
    _unnamed.clear()
