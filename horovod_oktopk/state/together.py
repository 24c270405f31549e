"""Actions of one rank alone (to open, write, read or rename a file), whose result all learn before any goes on.

Otherwise the others would wait for its messages for ever, or confuse them with those of its next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from ..errors import OptionError, PluginError, TransportError
from ..transport.base import Transport

T = TypeVar("T")


def together(transport: Transport, doing: str, action: Callable[[], T]) -> T:
    """Run an action on this rank; return its result once all ranks have succeeded. Collective.

    action: does not communicate. Ranks that have nothing to do give one that does nothing.
    doing: in words, after "could not".
    Raise the error of the first rank that has failed, with the same text on all ranks: an OptionError or PluginError
    as it is, an OSError with the same errno, and a PluginError for anything else.
    """
    result, failure = None, None
    try:
        result = action()
    except TransportError:
        raise  # there is nobody to be told
    except Exception as error:
        failure = error
    texts = gather_texts(transport, "" if failure is None else _to_text(failure, transport.rank, doing))
    told = next((text for text in texts if text), None)
    if told is not None:
        raise _from_text(told) from failure
    return cast(T, result)


def tell(transport: Transport, value: Any) -> Any:
    """Return rank 0's value, of plain values, on all ranks. Collective."""
    return json.loads(gather_texts(transport, json.dumps(value) if transport.rank == 0 else "")[0])


def gather_texts(transport: Transport, text: str) -> list[str]:
    """Return all ranks' texts, by rank. Collective."""
    message = np.frombuffer(text.encode(), np.uint8)
    sizes = transport.allgather(np.array([len(message)], np.int64))[:, 0]
    if not sizes.any():
        return [""] * transport.size
    return [bytes(part).decode() for part in transport.allgatherv(message, sizes)]


def _to_text(error: Exception, rank: int, doing: str) -> str:
    if isinstance(error, OptionError | PluginError):
        return json.dumps([type(error).__name__, None, str(error)])
    if isinstance(error, OSError):
        return json.dumps(["OSError", error.errno, f"rank {rank} could not {doing}: {error.strerror or error}"])
    return json.dumps(["PluginError", None, f"rank {rank} could not {doing}: {type(error).__name__}: {error}"])


def _from_text(text: str) -> Exception:
    kind: str
    number: int | None
    words: str
    kind, number, words = json.loads(text)
    if kind == "OSError":
        return OSError(words) if number is None else OSError(number, words)
    error: Exception = OptionError(words) if kind == "OptionError" else PluginError(words)
    return error
